"""The error of a job on hosts that cannot start."""

from __future__ import annotations


class LaunchError(Exception):
    """Raised when a job cannot be started; the text is one line that ends with the remedy."""
