"""Jobs by `sdp run --hosts`, for tests of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.launch.jobs import LAUNCHER, ROOT, Done
from tests.ranks import HANG_S

SLEEP = """
    subprocess.Popen(["sleep", "600"])
    print("here")
    while True: time.sleep(0.1)
"""


def on(mpi: str, *args: str, hosts: str = "localhost:2") -> list[str]:
    return [*LAUNCHER, "--mpirun", f"{mpi}/bin/mpirun", "--hosts", hosts, *args]


def environment(mpi: str = "", **more: str) -> dict[str, str]:
    """Without threads that were asked for, and mpi4py only where an MPI is given."""
    base = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    if mpi:
        base["PYTHONPATH"] = str(next(Path(mpi).glob("lib/python*/site-packages")))
        libraries = (Path(mpi, "lib", name) for name in ("libmpi.so.40", "libmpi.so.12"))
        base["MPI4PY_LIBMPI"] = str(next(path for path in libraries if path.exists()))
    return base | {"PYTHONWARNINGS": "ignore"} | more


def run(line: list[str], env: dict[str, str] | None = None, **options: object) -> Done:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        line,
        cwd=ROOT,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        **options,
    )


@contextmanager
def started(line: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a session of its own, so that signals reach it alone."""
    pipe = subprocess.PIPE
    launcher = subprocess.Popen(
        line,
        cwd=ROOT,
        env=environment(),
        stdout=pipe,
        stderr=pipe,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def everything_below(launcher: subprocess.Popen[str], lines: int) -> list[psutil.Process]:
    """All that the launcher has started, once its ranks have printed so many lines."""
    assert launcher.stdout
    for _ in range(lines):
        assert launcher.stdout.readline()
    return psutil.Process(launcher.pid).children(recursive=True)


def one_line(done: Done) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("sdp run: ") and done.stderr.count("\n") == 1, done.stderr
    assert "Hint: " in done.stderr
    return done.stderr
