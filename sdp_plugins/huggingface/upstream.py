"""A third-party function that is patched only if it is unchanged."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

log = logging.getLogger(__name__)

PATCHED = "patched_for_smddp"  # marks our functions in place of theirs

Version = tuple[int, int]


@dataclass(frozen=True)
class Upstream:
    """A function of another library, and a check that it is unchanged.

    Attributes:
        package: Name of the library.
        checked: The first version with which the tests passed, and the first untested version.
        place: File and function, for messages.
        is_unchanged: Takes the module; returns whether it contains the code that is patched.
    """

    package: str
    checked: tuple[Version, Version]
    place: str
    is_unchanged: Callable[[Any], bool]

    def why_not(self, module: ModuleType, version: str) -> str:
        """Why the function must not be patched; empty if it may be.

        Args:
            module: Contains the function.
            version: Version of the library.
        """
        first, after = self.checked
        if not first <= major_and_minor(version) < after:
            return f"{version} is not in the range {dotted(first)} to below {dotted(after)}"
        if not self._looks_unchanged(module):
            return f"{version} has changed the code that smddp patches"
        return ""

    def complain(self, why: str) -> None:
        """Warn that the function is not patched."""
        log.warning(
            "smddp does not patch %s of %s (%s): ddp_backend='smddp' may not work on CPUs. "
            "Hint: install another version, or set SDP_HUGGINGFACE=0 to silence this.",
            *(self.place, self.package, why),
        )

    def _looks_unchanged(self, module: ModuleType) -> bool:
        try:
            return self.is_unchanged(module)
        except (AttributeError, TypeError):
            return False


def major_and_minor(version: str) -> Version:
    """Parse a version such as "5.23.0" or "1.15.0.dev0"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def dotted(version: Version) -> str:
    """Format a version, such as "5.23"."""
    return ".".join(map(str, version))


def mentions(function: Any, *words: str) -> bool:
    """Whether the function's code contains these names and strings."""
    code: CodeType = function.__code__
    return {*words} <= {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
