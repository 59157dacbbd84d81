"""Suggestions for names that are unknown here, such as misspelt ones."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable

log = logging.getLogger(__name__)


def warn_of_unknown(given: Iterable[str], known: Collection[str], where: str = "") -> None:
    """Say which names are left alone, and what each is like.

    Args:
        given: Those that a user gave.
        known: Those that mean something, or are known to mean nothing here.
        where: What they are names in.
    """
    for name in sorted(set(given) - set(known)):
        meant = difflib.get_close_matches(name, known, 1, cutoff=0.75)
        hint = f". Hint: did you mean {meant[0]}?" if meant else ""
        log.warning("%s%s: unknown here, and left alone%s", where and f"{where}: ", name, hint)
