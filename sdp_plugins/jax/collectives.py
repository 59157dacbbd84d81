"""Collectives inside jitted functions.

Each fusion buffer is one XLA FFI call on aliased memory, compiled at its first use (see
``native_build``). Where it cannot be compiled, host callbacks copy the arrays. XLA runs independent
operations in any order, which may differ between ranks. Each call therefore passes a scalar token,
the turn, to the next call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.experimental import io_callback

from sdp_plugins.core import DType, Group, ReduceOp, _native, native_api, native_build
from sdp_plugins.core.native_build import CompileError
from sdp_plugins.core.shared_malloc import share_large_blocks
from sdp_plugins.core.tensor_lists import FusedAllReduce, gather_uneven

SOURCE = Path(__file__).with_name("csrc") / "all_reduce_ffi.cc"
TARGET = "sdp_all_reduce"


@cache
def register() -> None:
    """Register the compiled call with XLA.

    Raises:
        CompileError: The call cannot be compiled or loaded here.
    """
    library = native_build.build(
        SOURCE, version("jaxlib"), ["-std=c++17", f"-I{jax.ffi.include_dir()}"]
    )
    try:
        handler = ctypes.CDLL(str(library)).SdpAllReduce
    except OSError as error:
        raise CompileError(f"{SOURCE.name}: {error}. Hint: delete {library}") from None
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="cpu")


class JaxCollectives:
    """A group's collectives on arrays."""

    def __init__(self, group: Group) -> None:
        """Use the compiled call if all ranks have it."""
        self._group = group
        self._reduce = FusedAllReduce(group, share_large_blocks(group, jaxlib))
        self._endpoint = native_api.agreed_endpoint(group, register)

    def all_reduce(self, arrays: Sequence[Any], op: str, turn: Any) -> tuple[list[Any], Any]:
        """Reduce lists of arrays.

        Args:
            arrays: Arrays of equal shapes and dtypes on all ranks.
            op: ``sum``, ``avg``, ``min`` or ``max``.
            turn: The turn that the previous call returned; a float32 scalar for the first call.

        Returns:
            New arrays, and the turn.
        """

        def reduce(bucket: Sequence[Any]) -> Sequence[Any]:
            nonlocal turn
            *results, turn = self._bucket(bucket, op, turn)
            return results

        arrays = [jnp.asarray(array) for array in arrays]
        sizes = [(array.size, DType.parse(array.dtype.name)) for array in arrays]
        reduced = self._reduce.by_bucket(arrays, sizes, op, reduce)
        return reduced, turn

    def _bucket(self, arrays: Sequence[Any], op: str, turn: Any) -> Sequence[Any]:
        operands = [*arrays, turn]
        shapes = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
        if self._endpoint is None:

            def reduce(*given: Any) -> list[np.ndarray[Any, Any]]:
                return [*self._reduce.copies(given[:-1], op), np.asarray(given[-1])]

            return io_callback(reduce, shapes, *operands)  # type: ignore[no-any-return]
        # Without side effects, as XLA's own collectives: all ranks run the same program, and JAX
        # starts programs with effects from Python, which takes milliseconds for 300 arrays. JAX may
        # repeat such a call in a backward pass (`jax.checkpoint`), out of turn: call it outside.
        call = jax.ffi.ffi_call(
            TARGET,
            shapes,
            input_output_aliases={i: i for i in range(len(operands))},
        )
        return call(  # type: ignore[no-any-return]
            *operands,
            api=np.int64(_native.api()),
            endpoint=np.int64(self._endpoint),
            dtype=np.int32(int(DType.parse(arrays[0].dtype.name).native)),
            reduce_op=np.int32(int(ReduceOp.parse(op).native)),
            timeout_s=np.float64(self._group.timeout_s),
        )

    def all_gather(self, array: Any, rows: int, turn: Any) -> tuple[Any, Any]:
        """Concatenate the ranks' arrays along the first axis, whose length may differ, to `rows`.

        Takes and returns a turn, as ``all_reduce`` does.
        """

        def gather(array: Any, turn: Any) -> list[Any]:
            return [gather_uneven(self._group, np.asarray(array)), np.asarray(turn)]

        whole = jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype)
        gathered, turn = io_callback(
            gather, [whole, jax.ShapeDtypeStruct(turn.shape, turn.dtype)], array, turn
        )
        return gathered, turn


def after(turn: Any, arrays: Sequence[Any]) -> Any:
    """Return a turn that also depends on arrays.

    The dependency is arithmetic, because XLA removes barriers before it schedules operations.
    """
    firsts = [jnp.ravel(array)[0].astype(jnp.float32) for array in arrays if array.size]
    # Zero whatever their values: results are multiplied by one plus the turn.
    return turn + sum(0.0 * jnp.where(jnp.isfinite(first), first, 0.0) for first in firsts)
