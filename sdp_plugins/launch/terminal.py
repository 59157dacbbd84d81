"""Pseudo-terminals for rank 0: its progress bars move as if it were on the launcher's terminal."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import tty

from sdp_plugins.launch.worker_group import RankOutput

Ends = tuple[int, int]
"""Descriptors: where a rank's output is read, and where the rank writes."""


def on_a_terminal(output: RankOutput) -> bool:
    """Whether both streams of a rank's output go to a terminal."""
    return output.stdout.sink.terminal and output.stderr.sink.terminal


def open_ends(output: RankOutput) -> Ends:
    """Open a pseudo-terminal in the place of a pipe; a pipe if there is none to be had."""
    try:
        ours, theirs = os.openpty()
    except OSError:  # no /dev/pts
        return os.pipe()
    tty.setraw(theirs)  # the launcher's terminal translates line ends
    resize(ours, output)
    return ours, theirs


def resize(fd: int, output: RankOutput) -> None:
    """Make a pseudo-terminal as large as the launcher's terminal, less the prefix of its lines."""
    try:
        size = os.get_terminal_size(output.stdout.sink.fd)
    except OSError:  # it has been closed
        return
    if size.columns:  # else nobody has said how large it is
        columns = max(1, size.columns - len(output.stdout.prefix.decode()))
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, columns, 0, 0))
