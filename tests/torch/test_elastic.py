"""torchrun reports a rank that was killed, or restarts the job, which goes on from a checkpoint."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.ranks import HANG_S, free_port

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
dist.init_process_group("smddp")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
kept = folder / "state.pt"
state = torch.load(kept) if kept.exists() else {"step": 0, "total": torch.zeros(3)}
while state["step"] < 6:
    if attempt == 0 and state["step"] == 3 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.full((3,), float(rank + state["step"]))
    dist.all_reduce(tensor)
    state = {"step": state["step"] + 1, "total": state["total"] + tensor}
    if rank == 0:
        torch.save(state, folder / "new")
        (folder / "new").rename(kept)
    dist.barrier()
(folder / f"done.{rank}").write_text(f"{attempt} {state['total'].tolist()}")
dist.destroy_process_group()
"""


def torchrun(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    where = [*options, f"--master-port={free_port()}"]
    return subprocess.run(
        [*command, *where, script, folder], capture_output=True, text=True, timeout=HANG_S
    )


def test_torchruns_summary_names_the_lost_rank(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--monitor-interval=5")  # time for rank 0 to notice
    assert done.returncode == 1
    summary = done.stderr.split("train.py FAILED")[1]
    assert re.search(r"rank +: 1 .*\n.*SIGKILL", summary)
    assert "PeerLostError: [rank 0/2] all_reduce #" in summary
    assert ": rank 1 ended unexpectedly" in summary


def test_restart_after_a_killed_rank(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--max-restarts=1", "--monitor-interval=0.1")
    assert done.returncode == 0, done.stderr
    total = float(sum(2 * step + 1 for step in range(6)))
    for rank in range(2):
        assert (tmp_path / f"done.{rank}").read_text() == f"1 {[total] * 3}"
