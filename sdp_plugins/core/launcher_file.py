"""A file through which ranks tell their launcher something."""

from __future__ import annotations

import os


class LauncherFile:
    """A file, made by the launcher; a memfd, so that it ends with the launcher.

    Args:
        name: Shown by tools such as lsof.
    """

    def __init__(self, name: str) -> None:
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC)

    @property
    def path(self) -> str:
        """Path by which ranks open the file."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
