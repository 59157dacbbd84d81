"""The `file://` addresses of channels, outputs and dependencies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_FILE = "file://"


def folder_of(address: str) -> Path:
    """The path of `file://PATH`, or of a bare path.

    Raises:
        ValueError: It is in S3, or elsewhere.
    """
    text = str(address)
    if "://" in text and not text.startswith(_FILE):
        raise ValueError(
            f"{text} is not on this machine. Hint: download it and pass file://FOLDER."
        )
    return Path(text.removeprefix(_FILE)).expanduser().absolute()


def read_channels(inputs: str | Mapping[str, str] | None) -> dict[str, Path]:
    """Names and folders of the channels that were given to `fit`.

    Raises:
        ValueError: One is not a folder.
    """
    given = {"training": inputs} if isinstance(inputs, str) else dict(inputs or {})
    channels = {name: folder_of(address) for name, address in given.items()}
    for name, folder in channels.items():
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise ValueError(f"channel {name!r}: a name has letters, digits, '.', '_' and '-'")
        if not folder.is_dir():
            raise ValueError(f"channel {name!r}: there is no folder {folder}")
    return channels


def existing(address: str) -> Path:
    """The path of a dependency.

    Raises:
        ValueError: It does not exist.
    """
    path = folder_of(address)
    if not path.exists():
        raise ValueError(f"dependencies: there is no {path}")
    return path
