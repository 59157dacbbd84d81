"""Lets the ranks' progress bars move on the launcher's terminal, which they reach through pipes."""

from __future__ import annotations

import os
from collections.abc import Mapping


def is_terminal(fd: int) -> bool:
    """Whether a descriptor is a terminal whose cursor can be moved.

    The output of a `!` line in a notebook is a terminal that shows such moves as empty lines.
    IPython's kernel sets these two variables.
    """
    notebook = os.environ.get("TERM") == "xterm-color" and os.environ.get("PAGER") == "cat"
    return os.isatty(fd) and not notebook


def terminal_environment(environment: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The variables by which rich, tqdm and Keras draw for the launcher's terminal.

    Empty unless stdout and stderr are terminals. What the user has set is left as it is:
    ``TTY_INTERACTIVE=0`` turns rich's moving bars off.

    Args:
        environment: The launcher's variables.
        prefix: Beginning of each line, which takes columns from the ranks.
    """
    if not (is_terminal(1) and is_terminal(2)):
        return {}
    size = os.get_terminal_size(1)
    if not size.columns:  # a terminal of which nobody has said how large it is
        return {}
    variables = {
        "TTY_COMPATIBLE": "1",
        "TTY_INTERACTIVE": "1",
        "COLUMNS": str(max(1, size.columns - len(prefix))),
        "LINES": str(size.lines),
    }
    return {name: value for name, value in variables.items() if name not in environment}
