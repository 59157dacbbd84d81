"""Terminals: whether one is there, and others like it for ranks."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import tty
from collections.abc import Mapping


def is_terminal(fd: int) -> bool:
    """Whether a descriptor is a terminal whose cursor can be moved.

    The output of a `!` line in a notebook is a terminal that shows such moves as empty lines.
    IPython's kernel sets these two variables.
    """
    notebook = os.environ.get("TERM") == "xterm-color" and os.environ.get("PAGER") == "cat"
    return os.isatty(fd) and not notebook


def open_ends(like: int, margin: int) -> tuple[int, int]:
    """Open a pseudo-terminal in the place of a pipe; a pipe if there is none to be had.

    Args:
        like: A terminal.
        margin: Columns of it that lines have no room for.

    Returns:
        The reading and the writing end.
    """
    try:
        ours, theirs = os.openpty()
    except OSError:  # no /dev/pts
        return os.pipe()
    tty.setraw(theirs)  # the other terminal translates line ends
    resize(ours, like, margin)
    return ours, theirs


def resize(fd: int, like: int, margin: int) -> None:
    """Make a pseudo-terminal as large as another terminal, less a margin."""
    if size := _size(like, margin):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))


def columns(environment: Mapping[str, str], like: int, margin: int) -> dict[str, str]:
    """The variable COLUMNS, for programs that would find the width of the whole terminal.

    rich asks stdin first, which is the launcher's.
    """
    size = _size(like, margin)
    if size and (os.isatty(0) or "COLUMNS" in environment):
        return {"COLUMNS": str(size.columns)}
    return {}


def _size(terminal: int, margin: int) -> os.terminal_size | None:
    try:
        size = os.get_terminal_size(terminal)
    except OSError:  # it has been closed
        return None
    if not size.columns:  # nobody has said how large it is
        return None
    return os.terminal_size((max(1, size.columns - margin), size.lines))
