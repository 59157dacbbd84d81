"""The end of a command whose output nobody reads any more, as after `| head`."""

from __future__ import annotations

import os
import signal
import sys


def exit_code() -> int:
    """The exit code after a `BrokenPipeError` of stdout, which Python must not flush at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
