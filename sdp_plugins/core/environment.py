"""The environment of this process, for code that runs in every rank and imports little."""

from __future__ import annotations

import os


def environment() -> dict[str, str]:
    """Return a copy of the environment of this process."""
    return dict(os.environ)
