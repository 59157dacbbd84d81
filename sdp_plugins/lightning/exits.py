"""Exit codes of processes, their descriptions and hints."""

from __future__ import annotations

import os
import signal
import sys


def end_now(code: int) -> None:
    """End this process from a thread, because the main thread may be blocked in native code."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def describe(code: int) -> str:
    """Describe a return code."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def hint(code: int) -> str:
    """The hint for a return code."""
    if code == -signal.SIGKILL:
        return "SIGKILL comes from a user, or from the kernel when memory is short (see dmesg)."
    return "see its traceback above, if it wrote one."


def exit_code(code: int) -> int:
    """The exit code that a shell gives for a return code."""
    return 128 - code if code < 0 else code
