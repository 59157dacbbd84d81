"""The command line of a rank's entry point, and the mpirun options that have an effect."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)


def command_line(code: Path, entry_point: str, arguments: Sequence[str]) -> list[str]:
    """The command line by which SageMaker's toolkit starts an entry point.

    Args:
        code: The folder of code.
        entry_point: A Python script, a module of a package (if there is a setup.py), or any other
            program, which a shell starts.
        arguments: The entry point's arguments.
    """
    path = Path(entry_point)
    if path.suffix == ".py" and not (code / "setup.py").exists():
        return [sys.executable, "-u", entry_point, *arguments]
    if path.suffix == ".py":
        return [sys.executable, "-u", "-m", path.stem, *arguments]
    (code / entry_point).chmod(0o755)
    return ["/bin/sh", "-c", f"./{shlex.join([entry_point, *arguments])}"]


def variables_for_mpirun(options: str) -> dict[str, str]:
    """The variables of `-x NAME=VALUE`; other options have no effect, without mpirun."""
    words, left = options.split(), []
    found: dict[str, str] = {}
    while words:
        word = words.pop(0)
        if word == "-x" and words:
            name, _, value = words.pop(0).partition("=")
            found |= {name: value} if value else {}
        else:
            left.append(word)
    if left:
        log.info("custom_mpi_options without an effect on this machine: %s", " ".join(left))
    return found
