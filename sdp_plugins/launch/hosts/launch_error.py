"""What keeps a job on hosts from starting."""

from __future__ import annotations


class LaunchError(Exception):
    """The job cannot be started; the text is one line that ends with the remedy."""
