"""Programs on nodes that this machine plays, for tests of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.nodes import MPI

LIMIT_S = 250.0
PRELUDE = """
import os, subprocess
def say(*words):  # in one piece, whoever else writes
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def end_launchers():  # which would wait for the nodes that they cannot reach any more
    subprocess.run(["pkill", "-KILL", "-f", "mpiexec|torch.distributed.run"])
"""
Script = Callable[[str], str]


def cluster(*options: str, program: Sequence[str]) -> list[str]:
    bench = [sys.executable, "-m", "benchmarks", "cluster"]
    return [*bench, *options, "--", sys.executable, *program]


def environment(mpi: str = MPI) -> dict[str, str]:
    """Ranks find mpi4py where the MPI is, and the tests' modules here."""
    root = Path(__file__).parents[2]
    packages = [str(path) for path in Path(mpi).glob("lib/python*/site-packages")] if mpi else []
    lean = root / "tests" / "lightning" / "lean"
    path = os.pathsep.join([str(lean), str(root), *packages])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def run(*options: str, program: Sequence[str], mpi: str = MPI) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        cluster(*options, program=program),
        env=environment(mpi),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def mpirun(program: Sequence[str], layout: tuple[int, int] = (2, 2), mpi: str = MPI) -> list[str]:
    """Run a program by mpirun; its lines, sorted, if it succeeded."""
    nodes, ranks = layout
    place = ("--nodes", str(nodes), "--ranks-per-node", str(ranks))
    done = run(*place, "--launcher", "mpirun", "--mpi-prefix", mpi, program=program, mpi=mpi)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


# `setup` sets a time-out when the ranks have met. Each rank then waits until the other has said it,
# in a file: a launcher that is killed may not have passed on what a rank has printed.
LINK_DOWN = """
    import os, pathlib, subprocess, time
    from datetime import timedelta
    {setup}
    said = [pathlib.Path(__file__).with_name(f"said by {{rank}}") for rank in range(2)]
    line = ""
    try:
        for turn in range(1000):
            if turn == 3 and group.node_rank == 1 and group.local_rank == 0:
                subprocess.run(["ip", "link", "set", "net0", "down"], check=True)
            reduce()
    except RuntimeError as error:
        there = "node0" if group.node_rank else "node1"
        line = f"{{type(error).__name__}} {{f'on {{there}}' in str(error)}}"
    written = said[group.rank].with_suffix(".written")
    written.write_text(line)
    written.rename(said[group.rank])
    end = time.monotonic() + {patience_s}
    while not said[1 - group.rank].exists() and time.monotonic() < end: time.sleep(0.01)
    end_launchers()
    os._exit(0)
"""
