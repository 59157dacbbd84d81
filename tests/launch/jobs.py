"""Jobs of `sdp run`: scripts, and launchers to start them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.ranks import HANG_S
from tests.side_by_side import side_by_side

Done = subprocess.CompletedProcess[str]
Script = Callable[..., str]
LAUNCHER = [sys.executable, "-m", "sdp_plugins.launch", "run"]
ROOT = Path(__file__).parents[2]

HEADER = """
import json, os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def await_file(name):
    while not pathlib.Path(__file__).with_name(name).exists(): time.sleep(0.01)
def touch(name):
    pathlib.Path(__file__).with_name(name).touch()
def lose(text):
    from sdp_plugins.core import PeerLostError
    from sdp_plugins.core.error_file import write_uncaught
    write_uncaught()
    text = f"[rank {rank}/{os.environ['WORLD_SIZE']}] all_reduce #3: {text}"
    raise PeerLostError(text, ranks=[1], op="all_reduce", seq=3)
"""

HANGING = """
import time
from sdp_plugins.core import Group
def asleep(): time.sleep(600)
with Group.from_env() as group:
    group.barrier()
    if rank == 1: asleep()
    print("waits", flush=True)
    group.barrier()
"""


def launch(
    *args: str, launcher: Sequence[str] = LAUNCHER, cwd: Path = ROOT, **options: Any
) -> Done:
    """A job to its end."""
    return subprocess.run(
        [*launcher, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        **options,
    )


def launch_page(
    page: str,
    folder: Path,
    options: Sequence[str] = ("-n", "2"),
    program: str = "train.py",
    arguments: Sequence[str] = (),
    **more: Any,
) -> Done:
    """A program of a page of docs, as it is written, in a folder."""
    text = (ROOT / "docs" / page).read_text()
    (found,) = re.findall(rf"```python\n(# {re.escape(program)}\n.*?)```", text, re.DOTALL)
    (folder / program).write_text(found)
    return launch(*options, program, *arguments, cwd=folder, **more)


def launch_all(*jobs: tuple[str, ...]) -> list[Done]:
    """Several at once: they mostly wait."""
    return side_by_side(launch, jobs)


def start(*args: str) -> subprocess.Popen[str]:
    """A launcher in a session of its own, so that signals reach it alone."""
    return subprocess.Popen(
        [*LAUNCHER, *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def read_pids(launcher: subprocess.Popen[str], count: int) -> list[int]:
    """The pids that the ranks print, one a line, last word."""
    assert launcher.stdout
    return [int(launcher.stdout.readline().split()[-1]) for _ in range(count)]
