"""How processes end, in words and codes."""

from __future__ import annotations

import os
import signal
import sys


def end_now(code: int) -> None:
    """End this process from a thread, while the main thread may be stuck outside of Python."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def describe(code: int) -> str:
    """How a process with this return code ended."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def hint(code: int) -> str:
    """Where to look for the cause."""
    if code == -signal.SIGKILL:
        return "SIGKILL comes from a user, or from the kernel when memory is short (see dmesg)."
    return "its traceback, if it wrote one, stands above."


def exit_code(code: int) -> int:
    """The exit code of a shell for a process that ended so."""
    return 128 - code if code < 0 else code
