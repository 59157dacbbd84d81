"""What the ranks of a host become, from the process that starts a job to theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

_FILE = "script.json"


def write_script(host: Path, command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Say what a host's ranks become.

    Args:
        host: The host's folder.
        command: What they run in the folder of its code.
        variables: What they find beside the launcher's variables.
    """
    (host / _FILE).write_text(json.dumps([[*command], {**variables}]))


def read_script(host: Path) -> tuple[list[str], dict[str, str]]:
    """What `write_script` has said."""
    command, variables = json.loads((host / _FILE).read_text())
    return command, variables
