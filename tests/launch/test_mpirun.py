"""SMDDP's scripts under mpirun, with and without `smddprun`, on one node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nodes import MPIS
from tests.ranks import HANG_S

SMDDPRUN = [sys.executable, "-m", "sdp_plugins.launch.smddprun"]
BACKEND = """
import torch, torch.distributed as dist
{imports}
dist.init_process_group("smddp")
one = torch.ones(3)
dist.all_reduce(one)
print(f"{{dist.get_rank()}} of {{dist.get_world_size()}}: {{one.sum():.0f}}\\n", end="")
dist.destroy_process_group()
"""
FIRST_API = """
import torch
import smdistributed.dataparallel.torch.distributed as dist
dist.init_process_group()
one = torch.ones(3)
dist.all_reduce(one)
print(f"{dist.get_rank()} of {dist.get_world_size()}: {one.sum():.0f}\\n", end="")
"""
WITH_IMPORT = BACKEND.format(imports="import smdistributed.dataparallel.torch.torch_smddp")
WAYS = {
    "the backend, in smddprun": (SMDDPRUN, BACKEND.format(imports="")),
    "the backend, imported": ([], WITH_IMPORT),
    "the first API": ([], FIRST_API),
    "the first API, in smddprun": (SMDDPRUN, FIRST_API),
}


def mpirun(name: str, *command: str) -> subprocess.CompletedProcess[str]:
    if not MPIS[name]:
        pytest.skip(f"no variable names an {name}")
    options = ["--allow-run-as-root", "--oversubscribe"] if name == "Open MPI" else []
    line = [f"{MPIS[name]}/bin/mpirun", *options, "-n", "2", *command]
    env = {"PATH": os.environ["PATH"], "HOME": "/root", "SDP_TIMEOUT_S": "150"}
    return subprocess.run(
        line, env=env, capture_output=True, text=True, timeout=HANG_S, check=False
    )


@pytest.mark.parametrize("name", MPIS)
def test_what_smddprun_sets(name: str) -> None:
    show = 'echo "$RANK of $WORLD_SIZE, $SMDATAPARALLEL_LOCAL_RANK at $MASTER_ADDR"; exit 0'
    done = mpirun(name, *SMDDPRUN, "sh", "-c", show)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [
        "0 of 2, 0 at 127.0.0.1",
        "1 of 2, 1 at 127.0.0.1",
    ]


@pytest.mark.parametrize(
    ("name", "way"), [*(("Open MPI", way) for way in WAYS), ("MPICH", "the first API, in smddprun")]
)
def test_scripts(tmp_path: Path, name: str, way: str) -> None:
    launcher, text = WAYS[way]
    (tmp_path / "train.py").write_text(text)
    done = mpirun(name, *launcher, sys.executable, str(tmp_path / "train.py"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["0 of 2: 6", "1 of 2: 6"]
