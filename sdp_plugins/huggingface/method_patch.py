"""Methods of accelerate and Trainer that are replaced in some jobs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_OURS = "_smddp"


def replace(owner: type, name: str, ours: Callable[..., Any], applies: Callable[[], bool]) -> None:
    """Replace a method; a second time changes nothing.

    Args:
        owner: The class.
        name: Of the method.
        ours: Called with the method, and then as the method.
        applies: Whether to call it now, rather than the method.
    """
    theirs = getattr(owner, name)
    known = getattr(theirs, _OURS, ())
    if ours in known:
        return

    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not applies():
            return theirs(self, *args, **kwargs)
        return ours(theirs, self, *args, **kwargs)

    setattr(method, _OURS, (*known, ours))
    setattr(owner, name, method)
