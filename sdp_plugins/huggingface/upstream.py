"""A third-party function that is patched only if it is unchanged."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

log = logging.getLogger(__name__)

BACKEND = "smddp"
PATCHED = "patched_for_smddp"  # marks our functions in place of theirs

Version = tuple[int, int]


@dataclass(frozen=True)
class Upstream:
    """The place, and how to tell that it has not changed.

    Attributes:
        package: Name of the library.
        checked: The first version in which the tests have passed, and the first after these.
        place: File and function, for messages.
        is_unchanged: Given the module, whether what is patched is still there.
    """

    package: str
    checked: tuple[Version, Version]
    place: str
    is_unchanged: Callable[[Any], bool]

    def why_not(self, module: ModuleType, version: str) -> str:
        """Why it stays as it is; empty if it is the code that was checked.

        Args:
            module: In which the place is.
            version: The library's.
        """
        first, after = self.checked
        if not first <= major_and_minor(version) < after:
            return f"{version} is not among {dotted(first)} and later, before {dotted(after)}"
        if not self._looks_unchanged(module):
            return f"in {version} the code that is patched is no longer there"
        return ""

    def complain(self, why: str) -> None:
        """Say in a job over smddp that it stays as it is."""
        log.warning(
            "smddp leaves %s of %s as it is (%s): ddp_backend='smddp' may not work on CPUs. "
            "Hint: install another version, or set SDP_HUGGINGFACE=0 to silence this.",
            *(self.place, self.package, why),
        )

    def _looks_unchanged(self, module: ModuleType) -> bool:
        try:
            return self.is_unchanged(module)
        except (AttributeError, TypeError):
            return False


def major_and_minor(version: str) -> Version:
    """Of a version such as "5.23.0" or "1.15.0.dev0"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def dotted(version: Version) -> str:
    """As people write it."""
    return ".".join(map(str, version))


def mentions(function: Any, *words: str) -> bool:
    """Whether the function's code uses these names and texts."""
    code: CodeType = function.__code__
    return {*words} <= {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
