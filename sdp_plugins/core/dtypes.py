"""Element types and reduction operators."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import numpy as np

from . import _native


class DType(Enum):
    """Type of the elements of a buffer.

    Attributes:
        native: The native core's name for it.
        itemsize: Bytes of one element.
    """

    float16 = "float16"
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    int8 = "int8"
    int16 = "int16"
    int32 = "int32"
    int64 = "int64"
    uint8 = "uint8"
    bool = "bool"
    complex64 = "complex64"
    complex128 = "complex128"

    native: _native.DType
    itemsize: int

    __hash__ = object.__hash__  # that of Enum is a Python function

    def __init__(self, name: str) -> None:
        # Plain attributes, not properties: they are read on the latency path.
        self.native = getattr(_native.DType, name)
        self.itemsize = _native.itemsize(self.native)

    @classmethod
    def parse(cls, dtype: object) -> DType:
        """Convert a DType, its name, or a NumPy type.

        Raises:
            TypeError: The type is not supported; the text lists the supported ones.
        """
        if isinstance(dtype, cls):
            return dtype
        name = str(dtype)
        if name not in cls.__members__ and dtype is not None:  # None is NumPy's float64
            with suppress(TypeError, ValueError):
                known: np.dtype[Any] = np.dtype(dtype)  # type: ignore[call-overload]
                name = known.name if known.isnative else name
        if name not in cls.__members__:
            names = ", ".join(cls.__members__)
            raise TypeError(f"{dtype!r} is not a supported element type. Hint: use one of {names}.")
        return cls[name]


DTypeLike = Any
"""A ``DType``, its name, or what NumPy takes for a type."""


@dataclass(frozen=True)
class ReduceOp:
    """A reduction operator.

    Use the constants, ``ReduceOp.premul_sum(factor)``, or a constant's lower-case name. Floating
    point follows one fixed binary tree over the ranks (16-bit floats in float32, rounded once);
    integers wrap; AVG of integers is summed in 64 bits and rounded toward zero; a NaN on any rank
    is a NaN in MIN and MAX; SUM of bool is "any", PRODUCT "all".
    """

    native: _native.ReduceOp
    factor: float = 1.0

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]

    @classmethod
    def premul_sum(cls, factor: float) -> ReduceOp:
        """Sum of each rank's values times that rank's own factor (floating point only)."""
        return cls(_native.ReduceOp.premul_sum, float(factor))

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Convert an operator or its name.

        Raises:
            ValueError: The name is unknown; the text lists the operators.
        """
        if isinstance(op, ReduceOp):
            return op
        found = _BY_NAME.get(op)
        if found is None:
            names = ", ".join(_BY_NAME)
            raise ValueError(f"unknown reduction {op!r}. Hint: use one of {names}.")
        return found

    @property
    def name(self) -> str:
        """Lower-case name, as in messages."""
        return self.native.name


_BY_NAME = {
    native.name: ReduceOp(native)
    for native in _native.ReduceOp
    if native is not _native.ReduceOp.premul_sum
}
for _name, _op in _BY_NAME.items():
    setattr(ReduceOp, _name.upper(), _op)
