"""Preloads modules and the values of the soak's operations before a chaos run forks its ranks."""

from stress.chaos import rank
from stress.soak import ready

__all__ = ["rank", "ready"]
