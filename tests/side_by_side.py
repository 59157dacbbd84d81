"""Jobs that mostly wait, or that need one core only, at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def side_by_side(
    function: Callable[..., T], calls: Iterable[tuple[Any, ...]], at_once: int = 8
) -> list[T]:
    """`function(*call)` for each of `calls`; the results in order, or the first exception."""
    with ThreadPoolExecutor(at_once) as executor:
        return list(executor.map(lambda call: function(*call), calls))
