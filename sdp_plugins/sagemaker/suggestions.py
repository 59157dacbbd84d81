"""Suggestions for unknown, possibly misspelt names."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable

log = logging.getLogger(__name__)


def warn_of_unknown(given: Iterable[str], known: Collection[str], where: str = "") -> None:
    """Warn of unknown names, which are ignored, and suggest the closest known name.

    Args:
        given: The user's names.
        known: The known names, including those without an effect.
        where: Where the names were given, for the message.
    """
    for name in sorted(set(given) - set(known)):
        meant = difflib.get_close_matches(name, known, 1, cutoff=0.75)
        hint = f". Hint: did you mean {meant[0]}?" if meant else ""
        log.warning("%s%s is unknown and ignored%s", where and f"{where}: ", name, hint)
