"""Passes the script of a host's ranks from the estimator's process to theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

_FILE = "script.json"


def write_script(host: Path, command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Write the script of a host's ranks.

    Args:
        host: The host's folder.
        command: Command line, run in the folder of the code.
        variables: Variables in addition to the launcher's.
    """
    (host / _FILE).write_text(json.dumps([[*command], {**variables}]))


def read_script(host: Path) -> tuple[list[str], dict[str, str]]:
    """Read what `write_script` has written."""
    command, variables = json.loads((host / _FILE).read_text())
    return command, variables
