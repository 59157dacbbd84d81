"""Namespaces of this command's own, of which nothing can stay behind.

The command starts itself again as the first process of new pid, mount and network namespaces. All
that it makes there (network namespaces, links, mounts, the ranks) goes with that process, however
it ends: the kernel kills its descendants and takes the rest apart. Nothing outside is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress

MARK = "SDP_TESTBED_SANDBOX"
_TOOLS = ("unshare", "setpriv", "ip", "tc", "nsenter")


def reason_against() -> str:
    """Why there can be no sandbox here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found (packages util-linux and iproute2)"
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "type", "bridge"],
        capture_output=True,
        check=False,
    )
    return "" if tried.returncode == 0 else "this kernel or container allows no bridge"


def inside() -> bool:
    """Whether this process is in a sandbox."""
    return MARK in os.environ


def enter() -> None:
    """Run this command in a sandbox and end with its status; returns there only.

    Raises:
        OSError: There can be none; the text says why.
    """
    if inside():
        prepare()
        return
    if reason := reason_against():
        raise OSError(reason)
    line = command([sys.executable, "-m", "benchmarks", *sys.argv[1:]])
    # In a session of its own: Ctrl-C comes to us, and ends it in order first.
    child = subprocess.Popen(line, env={**os.environ, MARK: "1"}, start_new_session=True)
    sys.exit(_wait(child))


def command(line: Sequence[str]) -> list[str]:
    """A command line as the first process of a sandbox, which has to call `prepare`."""
    return [
        *("setpriv", "--pdeathsig", "KILL"),  # should this process be killed
        "unshare",
        *("--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"),
        *("--mount", "--net", "--uts"),
        *line,
    ]


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for the command's end; SIGTERM and Ctrl-C end it."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    try:
        return child.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def prepare() -> None:
    """Where `ip netns` keeps its names, and programs their shared memory, must be ours.

    So must be their temporary files: launchers name some by process numbers, which sandboxes share.
    """
    os.makedirs("/run/netns", exist_ok=True)
    for place in ("/run/netns", "/dev/shm"):
        subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
