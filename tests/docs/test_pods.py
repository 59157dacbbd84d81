"""Several pods, which this machine plays, with what Kubeflow's operators give them.

The variables are those of training-operator 1.9 (pkg/controller.v1/pytorch/envvar.go) and of
mpi-operator 0.6 (pkg/controller/mpi_job_controller.go).
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.docs.manifests import MANIFESTS, command
from tests.launch.hosts import environment, run
from tests.launch.jobs import LAUNCHER, Script
from tests.launch.two_nodes import TWO_NODES
from tests.nodes import MPIS, needs_nodes

pytestmark = needs_nodes

TRAIN = """
    import torch, torch.distributed as dist
    dist.init_process_group("smddp")
    tensor = torch.ones(2**20)
    dist.all_reduce(tensor)
    nodes = dist.group.WORLD._group.nodes
    print(f"rank {rank} of {tensor.min():.0f} on {nodes.count}\\n", end="", flush=True)  # one write
    dist.destroy_process_group()
"""
# Runs both pods: the second one's command by what takes ssh's place.
BOTH = """
echo "10.77.0.1 train-master-0 train-worker-0" >> /etc/hosts
unset GLOO_SOCKET_IFNAME
"$HYDRA_LAUNCHER_EXEC" node1 "cd $PWD; $2" &
sh -c "$1" && wait $!
"""
MASTER = {
    name: value
    for prefix in ("", "PET_")
    for name, value in (
        (f"{prefix}MASTER_ADDR", "train-master-0"),
        (f"{prefix}MASTER_PORT", "23456"),
    )
}


def by_master(replicas: int, ranks: int, given: str) -> list[dict[str, str]]:
    """The pods' variables where a job has a master."""
    fixed = MASTER | {
        "PYTHONUNBUFFERED": "1",
        "WORLD_SIZE": str(replicas * ranks),
        "PET_NNODES": str(replicas),
        "PET_NPROC_PER_NODE": given,
    }
    return [fixed | {"RANK": str(pod), "PET_NODE_RANK": str(pod)} for pod in range(replicas)]


ELASTIC = {
    "PYTHONUNBUFFERED": "1",
    "PET_RDZV_ENDPOINT": "train-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "1:2",
    "PET_MAX_RESTARTS": "3",
    "PET_NPROC_PER_NODE": "2",
    "PET_RDZV_CONF": "last_call_timeout=30",
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
JOBS = {
    "torchrun": (by_master(2, 2, "2"), TORCHRUN, 4),
    "python": (by_master(2, 1, "auto"), [sys.executable], 2),
    "elastic": ([ELASTIC] * 2, TORCHRUN, 4),
}


def lines(ranks: int) -> list[str]:
    return [f"rank {rank} of {ranks} on 2" for rank in range(ranks)]


@pytest.mark.parametrize("kind", JOBS)
def test_a_pytorchjob(script: Script, kind: str) -> None:
    variables, program, ranks = JOBS[kind]
    assert command("pytorchjob.yaml") == ["torchrun", "train.py"]
    common = {"OMP_NUM_THREADS": "1", "SDP_TIMEOUT_S": "60"}
    line = [*program, script(TRAIN)]
    pods = [
        shlex.join(["env", *(f"{k}={v}" for k, v in (common | pod).items()), *line])
        for pod in variables
    ]
    done = run([*TWO_NODES, "sh", "-c", BOTH, "sh", *pods])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == lines(ranks)


# In the place of ssh: hands a worker's name to the stand-in, as that of its node.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
worker=${1#train-worker-}; shift
exec "$STAND_IN" "node$((${worker%%.*} + 1))" "$@"
"""
WORKERS = [f"train-worker-{number}.train.default.svc" for number in range(2)]
LAUNCHER_POD = f"""
printf '10.77.0.2 {WORKERS[0]}\\n10.77.0.3 {WORKERS[1]}\\n' >> /etc/hosts
export STAND_IN=$HYDRA_LAUNCHER_EXEC
export PRTE_MCA_plm_ssh_agent=$0 OMPI_MCA_plm_rsh_agent=$0 HYDRA_LAUNCHER_EXEC=$0
exec "$@"
"""
OPERATOR = {
    "MPICH": (
        ":2",
        {"HYDRA_HOST_FILE": "{}", "HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10"},
    ),
    "Open MPI": (
        " slots=2",
        {
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_default_hostfile": "{}",
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
    ),
}


@pytest.mark.parametrize("name", OPERATOR)
def test_an_mpijob(script: Script, tmp_path: Path, name: str) -> None:
    if not MPIS[name]:
        pytest.skip(f"no variable names an {name}")
    assert MANIFESTS["mpijob.yaml"]["spec"]["mpiImplementation"] == "MPICH"
    slots, variables = OPERATOR[name]
    hostfile, ssh = tmp_path / "hostfile", tmp_path / "ssh"
    hostfile.write_text("".join(f"{worker}{slots}\n" for worker in WORKERS))
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    # The page's command, but for the paths.
    _, _, option, _, *rest, _ = command("mpijob.yaml")
    mpirun = f"{MPIS[name]}/bin/mpirun"
    line = [*LAUNCHER, "--mpirun", mpirun, option, str(hostfile), *rest, script(TRAIN)]
    given = {key: value.format(hostfile) for key, value in variables.items()}
    env = environment(MPIS[name], SDP_TEST_NODES="3", SDP_TIMEOUT_S="60", **given)
    done = run([*TWO_NODES, "sh", "-c", LAUNCHER_POD, str(ssh), *line], env)
    assert done.returncode == 0, done.stderr
    expected = [f"[rank {rank}] {text}" for rank, text in enumerate(lines(4))]
    assert sorted(done.stdout.splitlines()) == expected
