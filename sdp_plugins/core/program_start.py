"""What the package's programs do before they import anything else."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def begin_program() -> None:
    """Prepare the interpreter.

    Closed standard streams become /dev/null. Nothing is imported from the current folder, which
    `python -m` puts first: a file there, such as rich.py, would hide a module. SIGTERM is taken for
    Ctrl-C: it has to restore the terminal, and to end what the program has started.
    """
    open_standard_streams()
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, mode))
    with suppress(FileNotFoundError):  # a folder that has been deleted is not there
        if sys.path[:1] == [os.getcwd()]:
            del sys.path[0]
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed, or a pipe would get its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
