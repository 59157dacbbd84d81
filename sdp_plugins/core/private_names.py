"""Checks that a framework still has the private names that a plug-in uses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from types import ModuleType


def check_names(framework: ModuleType, names: Mapping[str, str], extras: str) -> None:
    """Check that every name exists.

    Args:
        framework: The framework's top-level module.
        names: Paths below it, and the purpose of each.
        extras: The extras of sdp-plugins that install a suitable version.

    Raises:
        ImportError: A name does not exist in this version of the framework.
    """
    for path, purpose in names.items():
        try:
            reduce(getattr, path.split("."), framework)
        except AttributeError:
            raise ImportError(
                f"{framework.__name__} {framework.__version__} has moved "
                f"{framework.__name__}.{path}, which {purpose}. Hint: use a version of "
                f"{framework.__name__} that this sdp-plugins was made for (pip install "
                f"'sdp-plugins[{extras}]' takes one), or a newer sdp-plugins."
            ) from None
