"""Imports this package's native module and torch in a child, because either may fail or crash."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdp_plugins.launch.answers import answer_of
from sdp_plugins.launch.spawn import own_program

IMPORT_S = 60.0
MARK = "sdp-doctor "
"""Begins the lines of the child that are meant for us."""


@dataclass(frozen=True)
class Imports:
    """What the child has found.

    Attributes:
        found: By step, what `imported.main` prints.
        failed: Why the child did not come to its end; empty if it did.
    """

    found: Mapping[str, Any] = field(default_factory=dict)
    failed: str = ""


def marked(output: str) -> list[Any]:
    """The objects in the marked lines of a program's output; broken lines are left out."""
    found = []
    for line in output.splitlines():
        if line.startswith(MARK):
            try:
                found.append(json.loads(line[len(MARK) :]))
            except ValueError:
                continue
    return found


def import_in_child(python: Path, environment: Mapping[str, str], *, with_torch: bool) -> Imports:
    """Start the child, and read what it prints."""
    line = [str(python), *own_program("sdp_plugins.doctor.imported:main")[1:]]
    try:
        done = answer_of([*line, "torch"] if with_torch else line, environment, IMPORT_S)
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace") if error.stdout else ""
        return _of(output, f"took longer than {IMPORT_S:.0f} s")
    except OSError as error:
        return Imports(failed=f"cannot be started ({error.strerror})")
    return _of(done.stdout, _ending(done.returncode, done.stderr))


def _of(output: str, failed: str) -> Imports:
    found: dict[str, Any] = {}
    for part in marked(output):
        found.update(part)
    return Imports(found, failed)


def _ending(code: int, errors: str) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    last = errors.strip().splitlines()[-1:] or [f"exit code {code}"]
    return f"failed: {last[0]}"
