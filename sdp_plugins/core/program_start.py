"""What the package's programs do before they import anything else."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def begin_program() -> None:
    """Import from no current folder, which `python -m` puts first; take SIGTERM for Ctrl-C.

    A file there, such as rich.py, would hide a module. A signal has to restore the terminal, and to
    end what the program has started.
    """
    with suppress(FileNotFoundError):  # a folder that has been deleted is not there
        if sys.path[:1] == [os.getcwd()]:
            del sys.path[0]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
