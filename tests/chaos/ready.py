"""What ranks of a chaos run are forked with: modules, and the values of the soak's operations."""

from tests.chaos import rank
from tests.soak import ready

__all__ = ["rank", "ready"]
