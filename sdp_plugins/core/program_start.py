"""What the package's programs do before they import anything else."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def begin_program() -> None:
    """Prepare the interpreter.

    Closed standard streams become /dev/null: a pipe would get their numbers. Nothing is imported
    from the current folder, which `python -m` puts first: a file there, such as rich.py, would hide
    a module. SIGTERM is taken for Ctrl-C: it has to restore the terminal, and to end what the
    program has started.
    """
    for name in ("stdin", "stdout", "stderr"):  # in the order of their numbers
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(null, "r" if name == "stdin" else "w"))
    with suppress(FileNotFoundError):  # a folder that has been deleted is not there
        if sys.path[:1] == [os.getcwd()]:
            del sys.path[0]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
