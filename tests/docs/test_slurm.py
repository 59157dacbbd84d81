"""The scripts of the page on Slurm, with stand-ins for srun and scontrol, on two nodes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.launch.hosts import environment, run
from tests.launch.jobs import ROOT, Script
from tests.launch.two_nodes import TWO_NODES
from tests.nodes import needs_nodes

pytestmark = needs_nodes

PAGE = (ROOT / "docs" / "slurm.md").read_text()
SCRIPTS = dict(re.findall(r"```bash\n#!/bin/bash\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))
TRAIN = """
    import torch, torch.distributed as dist
    dist.init_process_group("smddp")
    one = torch.ones(1)
    dist.all_reduce(one)
    text = f"rank {dist.get_rank()} of {one.item():.0f} on {dist.group.WORLD._group.nodes.count}"
    print(f"{text}, {os.environ['OMP_NUM_THREADS']} threads\\n", end="", flush=True)  # one write
    dist.destroy_process_group()
"""
# Starts the tasks of a step with the variables that srun sets for them.
SRUN = r"""#!/bin/bash
per=$SLURM_NTASKS_PER_NODE
while [[ $1 == -* ]]; do shift; done
folder=$(mktemp -d)
export -p > "$folder/environment"
for node in 0 1; do
  for ((local = 0; local < per; local++)); do
    cat > "$folder/$node-$local" <<END
      . $folder/environment
      cd $(printf %q "$PWD")
      unset GLOO_SOCKET_IFNAME
      export SLURM_STEP_ID=0 SLURM_PROCID=$((node * per + local)) SLURM_LOCALID=$local
      export SLURM_NODEID=$node SLURM_STEP_NUM_TASKS=$((2 * per)) SLURM_NTASKS=$((2 * per))
      export SLURM_STEP_TASKS_PER_NODE='$per(x2)'
      exec $(printf '%q ' "$@")
END
    "$HYDRA_LAUNCHER_EXEC" node$node "bash $folder/$node-$local" &
  done
done
code=0
for task in $(jobs -p); do wait $task || code=$?; done
rm -r "$folder"
exit $code
"""
PROGRAMS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run"],
    "smddprun": ["-m", "sdp_plugins.launch.smddprun"],
    "sdp": ["-m", "sdp_plugins.launch"],
}


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A folder of the programs that the scripts call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    texts = {"srun": SRUN, "scontrol": "#!/bin/sh\nprintf 'node0\\nnode1\\n'\n"}
    for name, arguments in PROGRAMS.items():
        texts[name] = f'#!/bin/sh\nexec {shlex.join([sys.executable, *arguments])} "$@"\n'
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return str(folder)


def options(text: str) -> dict[str, str]:
    """What #SBATCH lines ask for."""
    lines = " ".join(re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE))
    return dict(re.findall(r"--([\w-]+)=(\S+)", lines))


@pytest.mark.parametrize(
    ("name", "nodes", "ranks"), [("one-node.sh", 1, 4), ("srun.sh", 2, 8), ("torchrun.sh", 2, 8)]
)
def test_a_script(
    script: Script, programs: str, tmp_path: Path, name: str, nodes: int, ranks: int
) -> None:
    train = shlex.quote(script(TRAIN))
    text = SCRIPTS[name]
    given = options(text)
    (tmp_path / name).write_text(text.replace("train.py", train))
    env = environment(
        PATH=f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin",
        PYTHONPATH=str(ROOT),
        SDP_TIMEOUT_S="100",
        SLURM_JOB_ID="7",
        SLURM_NNODES=given["nodes"],
        SLURM_NTASKS_PER_NODE=given.get("ntasks-per-node", "1"),
        SLURM_CPUS_PER_TASK=given["cpus-per-task"],
        SLURM_PROCID="0",  # of the batch script
        SLURM_NTASKS="1",
    )
    done = run([*TWO_NODES, "bash", str(tmp_path / name)], env)
    assert done.returncode == 0, done.stderr
    found = sorted(re.sub(r"^\[rank \d\] ", "", line) for line in done.stdout.splitlines())
    threads = 1 if nodes == 1 else 2
    assert found == [
        f"rank {rank} of {ranks} on {nodes}, {threads} threads" for rank in range(ranks)
    ]


def test_the_script_with_hosts(programs: str) -> None:
    """What the shell makes of it."""
    shell = f'PATH={programs}:$PATH; sdp() {{ printf "%s\\n" "$@"; }}\n{SCRIPTS["hosts.sh"]}'
    done = run(["bash", "-c", shell])
    words = ["run", "--hosts", "node0,node1", "-n", "8", "--threads", "2", "train.py"]
    assert done.stdout.splitlines() == words
