"""When fragments are exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral


@dataclass(frozen=True)
class Schedule:
    """When fragments are exchanged.

    Attributes:
        every: Steps from an exchange of a fragment to its next one.
        fragments: Number of fragments, whose exchanges are spread evenly over these steps.
        delay: Steps that the ranks go on training while a fragment is exchanged. What each learns
            in them it keeps.
    """

    every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name in ("every", "fragments", "delay"):
            if not isinstance(value := getattr(self, name), Integral):
                raise ValueError(f"{name}={value!r}: it must be an integer.")
            object.__setattr__(self, name, int(value))  # NumPy's integers have other texts
        if not 1 <= self.fragments <= self.every:
            raise ValueError(
                f"every={self.every}, fragments={self.fragments}: every fragment needs a step of "
                "its own. Hint: make fragments at most every, and both at least 1."
            )
        if not 0 <= self.delay <= self.every // self.fragments:
            raise ValueError(
                f"delay={self.delay}: the exchange of a fragment must end before the next one's. "
                f"Hint: a delay from 0 to {self.every // self.fragments} steps, which is "
                "every // fragments."
            )

    def begins(self, step: int) -> int | None:
        """The fragment whose exchange begins after this step, the first of which is 1."""
        for fragment in range(self.fragments):
            offset = self.every * (fragment + 1) // self.fragments
            if (step - offset) % self.every == 0:
                return fragment
        return None
