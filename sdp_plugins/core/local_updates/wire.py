"""The wire dtypes of local updates: those without options."""

from __future__ import annotations

from contextlib import suppress

from ..wire_dtype import WireDType


def parse_wire(wire: str | None) -> str:
    """Return the wire dtype of a group that exchanges parameters.

    Args:
        wire: As users write it; None: exactly.

    Raises:
        ValueError: There is no such type, or it has options.
    """
    with suppress(ValueError):
        parsed = WireDType.parse(str(wire or "none"))
        if parsed is None or not parsed.has_options:
            return str(parsed or "none")
    raise ValueError(f"wire={wire!r} cannot be used. Hint: int8, int4, fp8, bf16, fp16, or None.")


def refuse_options(wire: WireDType | None) -> None:
    """Refuse a state that no checkpoint has, and residuals of what is no longer there."""
    if wire is not None and wire.has_options:
        raise ValueError(
            f"local updates: the wire dtype {str(wire)!r} cannot be used. Hint: {wire.name!r}, "
            "without options."
        )
