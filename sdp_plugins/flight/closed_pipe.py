"""The end of a command whose output nobody reads any more, as after `| head`."""

from __future__ import annotations

import os
import signal
import sys


def exit_code() -> int:
    """The exit code after a `BrokenPipeError` of stdout."""
    discard_output()
    return 128 + signal.SIGPIPE


def discard_output() -> None:
    """Send stdout to /dev/null after an error: Python flushes it at its end, and must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
