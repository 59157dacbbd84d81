"""The environment of this process, for those who start with every rank and may import little."""

from __future__ import annotations

import os


def environment() -> dict[str, str]:
    """Return a copy of the environment of this process."""
    return dict(os.environ)
