"""The optimizer of the outer steps."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from .parameters import Floats


@dataclass(frozen=True)
class OuterStep:
    """SGD with Nesterov momentum, whose gradient is how far the ranks have come, negated.

    The defaults are those of DiLoCo (Douillard et al., 2023). A rate of 1 without momentum makes
    the parameters the average of the ranks': local SGD.

    Attributes:
        lr: Learning rate.
        momentum: Momentum.

    Raises:
        ValueError: They are no numbers that a training could use.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        with suppress(TypeError, ValueError):
            for name in ("lr", "momentum"):
                object.__setattr__(self, name, float(getattr(self, name)))  # 1 is the same as 1.0
            if 0 < self.lr < math.inf and 0 <= self.momentum < 1:
                return
        raise ValueError(
            f"{self}: it must have a positive rate, and a momentum of at least 0 and less than 1."
        )

    @classmethod
    def parse(cls, outer: OuterStep | str) -> OuterStep:
        """Return what `"average"` or `"nesterov"` means.

        Raises:
            ValueError: It is neither an outer step nor such a name.
        """
        found = _NAMES.get(outer) if isinstance(outer, str) else outer
        if not isinstance(found, cls):
            raise ValueError(
                f"outer={outer!r}: it must be 'average' or 'nesterov'. Hint: for another rate or "
                "momentum pass OuterStep(lr=..., momentum=...)."
            )
        return found

    def update(self, gradient: Floats, momenta: Floats) -> None:
        """Turn a gradient into the change of the parameters, in place.

        Args:
            gradient: Becomes the change.
            momenta: Zeros at first.
        """
        rate = np.float32(self.lr)
        if self.momentum:
            momenta *= np.float32(self.momentum)
            momenta += gradient
            gradient += np.float32(self.momentum) * momenta
        gradient *= -rate


AVERAGE = OuterStep(lr=1.0, momentum=0.0)
_NAMES = {"nesterov": OuterStep(), "average": AVERAGE}
