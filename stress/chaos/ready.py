"""What ranks of a chaos run are forked with: modules, and the values of the soak's operations."""

from stress.chaos import rank
from stress.soak import ready

__all__ = ["rank", "ready"]
