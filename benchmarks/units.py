"""Sizes and times in human-readable form: sizes are binary, rates are decimal."""

from __future__ import annotations

import re

_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse "4K", "25M", "1GiB" or "100" to bytes.

    Raises:
        ValueError: The text is no size, or zero.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size; write 4096, 4K, 25M or 1G")
    return int(match[1]) * _BINARY[match[2].upper()]


def parse_list(text: str) -> list[str]:
    """Return the non-empty items of "a, b,c"."""
    return [item.strip() for item in text.split(",") if item.strip()]


def format_size(nbytes: int) -> str:
    """Format bytes, such as "25 MiB", "4 KiB", "100 B"."""
    for name in ("G", "M", "K"):
        if nbytes >= _BINARY[name]:
            return f"{nbytes / _BINARY[name]:.4g} {name}iB"
    return f"{nbytes} B"


def format_time(us: float) -> str:
    """Format with three significant digits, such as "13.2 us" or "4.71 ms"."""
    if us >= 999.5:
        ms = us / 1000
        return f"{ms:.0f} ms" if ms >= 99.5 else f"{ms:#.3g} ms"
    return f"{us:.0f} us" if us >= 99.5 else f"{us:#.3g} us"
