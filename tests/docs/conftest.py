"""Scripts for jobs."""

from tests.launch.conftest import script

__all__ = ["script"]
