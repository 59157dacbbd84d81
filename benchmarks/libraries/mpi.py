"""MPI through mpi4py; mpiexec has started the rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from benchmarks.libraries.base import Place, UnsupportedError
from benchmarks.values import storage

_DATATYPES = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int8": MPI.INT8_T,
    "uint8": MPI.UINT8_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
}


class Mpi:
    """MPI_Allreduce in place on a NumPy array."""

    reduces = True

    def __init__(self, place: Place) -> None:
        self.array = np.empty(0)
        self.datatype = MPI.FLOAT
        world = MPI.COMM_WORLD
        if (world.rank, world.size) != (place.rank, place.ranks):
            raise RuntimeError(f"MPI gave rank {world.rank}/{world.size}: another MPI's mpiexec?")
        first_line = MPI.Get_library_version().splitlines()[0]
        self.version = " ".join(first_line.replace(",", " ").split()[:3])

    def allocate(self, count: int, dtype: str) -> None:
        """Allocate a plain array."""
        self.datatype = _DATATYPES.get(dtype) or _half(dtype)
        self.array = np.zeros(count, storage(dtype))

    def view(self) -> NDArray:
        """Return the array itself."""
        return self.array

    def operation(self, name: str) -> Callable[[], object]:
        """Return an upper-case, buffer-based call of mpi4py; these are the fast ones."""
        if name == "all_reduce":
            message = [self.array, self.datatype]
            return partial(MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE, message)
        if name == "barrier":
            return MPI.COMM_WORLD.Barrier
        raise UnsupportedError(f"MPI: no {name}")

    def path(self) -> str:
        """Return an empty path: MPI reports none."""
        return ""

    def close(self) -> None:
        """Do nothing: MPI_Finalize runs at exit."""
        MPI.COMM_WORLD.Barrier()


def _half(dtype: str) -> MPI.Datatype:
    names = {"float16": ("C_FLOAT16", "FLOAT16_T"), "bfloat16": ("BFLOAT16_T",)}[dtype]
    for name in names:
        datatype = getattr(MPI, name, MPI.DATATYPE_NULL)
        if datatype != MPI.DATATYPE_NULL:
            return datatype
    raise UnsupportedError(f"this MPI has no {dtype}")
