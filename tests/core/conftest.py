"""A place for stores."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def root() -> Iterator[str]:
    """A directory for a store, open to all users."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o777)
        yield path
