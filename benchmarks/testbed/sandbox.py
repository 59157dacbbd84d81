"""Namespaces for this command, of which nothing can be left behind.

The command restarts itself as the first process of new pid, mount and network namespaces.
Everything that it creates there (network namespaces, links, mounts, ranks) ends with that process,
however it
ends: the kernel kills its descendants and removes the rest. Nothing outside changes.
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
    """Return why a sandbox is impossible here; empty if it is possible."""
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
    """Return whether this process is in a sandbox."""
    return MARK in os.environ


def enter() -> None:
    """Run this command in a sandbox and exit with its status; returns only inside the sandbox.

    Raises:
        OSError: A sandbox is impossible; the text contains the reason.
    """
    if inside():
        prepare()
        return
    if reason := reason_against():
        raise OSError(reason)
    line = command([sys.executable, "-m", "benchmarks", *sys.argv[1:]])
    # In a session of its own: Ctrl-C reaches only this process, which ends the child in order.
    child = subprocess.Popen(line, env={**os.environ, MARK: "1"}, start_new_session=True)
    sys.exit(_wait(child))


def command(line: Sequence[str]) -> list[str]:
    """Return a command line for the first process of a sandbox, which has to call `prepare`."""
    return [
        *("setpriv", "--pdeathsig", "KILL"),  # if this process is killed
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
    """Mount private folders for the names of `ip netns` and for shared memory.

    Temporary files need one as well: launchers name some by process ids, which sandboxes share.
    """
    os.makedirs("/run/netns", exist_ok=True)
    for place in ("/run/netns", "/dev/shm"):
        subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
