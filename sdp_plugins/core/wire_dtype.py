"""The type in which reductions send float32 values between nodes, as users write it."""

from __future__ import annotations

from dataclasses import dataclass

_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16"}
_WHOLE = ("none", "float32")
_HALVES = ("bfloat16", "float16")
_BLOCKS = ("int8", "fp8", "int4")
_MOST_SEED = 2**32 - 1


@dataclass(frozen=True)
class WireDType:
    """What ``"bf16"``, ``"int8"`` or ``"int8 stochastic=7 feedback"`` means.

    Attributes:
        name: ``bfloat16``, ``float16``, ``int8``, ``fp8`` or ``int4``.
        seed: Seed of stochastic rounding; None: values are rounded to the nearest.
        feedback: Whether each rank adds what rounding has left out of a buffer's values to the
            buffer's next values.
    """

    name: str
    seed: int | None = None
    feedback: bool = False

    @property
    def has_blocks(self) -> bool:
        """Whether the type has 8 bits or fewer, and a scale for each block of values."""
        return self.name in _BLOCKS

    @property
    def has_options(self) -> bool:
        """Whether values are rounded otherwise than to the nearest, once and for all."""
        return self.seed is not None or self.feedback

    @classmethod
    def parse(cls, text: str) -> WireDType | None:
        """Return the type; None: float32 values travel as they are.

        Raises:
            ValueError: It is no such type.
        """
        first, *options = text.lower().replace(",", " ").split() or [""]
        name = _SHORT_NAMES.get(first, first)
        if name in _WHOLE and not options:
            return None
        if name not in (*_HALVES, *_BLOCKS) or (options and name not in _BLOCKS):
            raise _unknown(text)
        seed, feedback = None, False
        for option in options:
            word, given, value = option.partition("=")
            if word == "stochastic":
                seed = _seed(value) if given else 0
            elif option == "feedback":
                feedback = True
            else:
                raise _unknown(text)
        return cls(name, seed, feedback)

    def __str__(self) -> str:
        """Return the text that means this type."""
        seed = "" if self.seed is None else f" stochastic={self.seed}"
        return f"{self.name}{seed}{' feedback' * self.feedback}"


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) > _MOST_SEED:
        raise _unknown(text)
    return int(text)


def _unknown(text: str) -> ValueError:
    return ValueError(f"{text!r} is no wire dtype")
