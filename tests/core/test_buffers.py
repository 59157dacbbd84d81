"""What can be handed to a group, without a copy, and what is refused in which words."""

from __future__ import annotations

import array
import ctypes
import importlib.util
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import Buffer, DType
from sdp_plugins.core.buffers import as_buffer
from tests.core.kept_group import kept_group
from tests.ranks import Pool

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
needs_ml_dtypes = pytest.mark.skipif(
    importlib.util.find_spec("ml_dtypes") is None, reason="ml_dtypes is not installed"
)


class OnlyInterface:
    """Memory that only __array_interface__ describes."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = data
        self.__array_interface__ = data.__array_interface__


class OnlyDLPack:
    """Memory that only __dlpack__ describes; on whatever device it says."""

    def __init__(self, data: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.data, self.device = data, device

    def __dlpack__(self, **how: Any) -> Any:
        return self.data.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def torch(text: str) -> Any:
    import torch

    return eval(text, {"torch": torch})


def numbers(dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(6).astype(dtype)


def mapped() -> mmap.mmap:
    memory = mmap.mmap(-1, 6)
    memory[:] = bytes(range(6))
    return memory


def ml_dtypes_bfloat16() -> Any:
    import ml_dtypes

    return numbers(ml_dtypes.bfloat16)


# Each holds 0, 1, ... 5.
KINDS: dict[str, tuple[Callable[[], Any], DType]] = {
    **{
        f"numpy {dtype.value}": (lambda d=dtype.value: numbers(d), dtype)
        for dtype in DType
        if dtype not in (DType.bfloat16, DType.bool)
    },
    **{
        f"array '{code}'": (lambda c=code: array.array(c, range(6)), dtype)
        for code, dtype in {
            "b": DType.int8,
            "B": DType.uint8,
            "h": DType.int16,
            "i": DType.int32,
            "l": DType.int64,
            "q": DType.int64,
            "f": DType.float32,
            "d": DType.float64,
        }.items()
    },
    "numpy 2-d": (lambda: numbers().reshape(2, 3), DType.float32),
    "numpy slice": (lambda: np.arange(-2.0, 20.0)[2:8], DType.float64),
    "numpy row": (lambda: np.arange(-6, 12, dtype=np.int16).reshape(3, 6)[1], DType.int16),
    "numpy C long long": (lambda: numbers(np.longlong), DType.int64),
    "numpy unaligned": (
        lambda: np.frombuffer(bytearray(b"x" + numbers().tobytes()), np.float32, offset=1),
        DType.float32,
    ),
    "bytearray": (lambda: bytearray(range(6)), DType.uint8),
    "memoryview": (lambda: memoryview(numbers(np.complex64)), DType.complex64),
    "memoryview cast": (
        lambda: memoryview(bytearray(numbers().tobytes())).cast("f"),
        DType.float32,
    ),
    "memoryview half": (lambda: memoryview(numbers(np.float16)), DType.float16),
    "ctypes": (lambda: (ctypes.c_double * 6)(*range(6)), DType.float64),
    "mmap": (mapped, DType.uint8),
    "array interface": (lambda: OnlyInterface(numbers(np.int32)), DType.int32),
    "dlpack": (lambda: OnlyDLPack(numbers(np.float16)), DType.float16),
    "dlpack 2-d": (lambda: OnlyDLPack(numbers(np.complex128).reshape(3, 2)), DType.complex128),
}
TORCH_KINDS = {
    **{f"torch.arange(6).to(torch.{d.value})": d for d in DType if d is not DType.bool},
    "torch.arange(6.0).reshape(2, 3)": DType.float32,
    "torch.arange(-2.0, 20.0)[2:8]": DType.float32,
    "torch.arange(6.0).reshape(2, 3).t().contiguous().t().clone().reshape(1, 6)": DType.float32,
    "torch.arange(6.0).reshape(1, 6).expand(1, 6)": DType.float32,
    "torch.nn.Parameter(torch.arange(6.0))": DType.float32,
}


def read(buffer: Buffer) -> list[float]:
    """The memory that a buffer describes, with no help of its owner."""
    raw = (ctypes.c_char * buffer.nbytes).from_address(buffer.ptr)
    if buffer.dtype is DType.bfloat16:
        bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).tolist()
    return np.frombuffer(raw, buffer.dtype.value).tolist()


def check(data: Any, dtype: DType) -> None:
    buffer = as_buffer(data)
    assert (buffer.count, buffer.dtype, buffer.nbytes) == (6, dtype, 6 * dtype.itemsize)
    assert read(buffer) == [0, 1, 2, 3, 4, 5]
    assert buffer.keepalive is not None
    again = as_buffer(buffer)
    assert again is buffer


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    make, dtype = KINDS[kind]
    check(make(), dtype)


@needs_torch
@pytest.mark.parametrize("text", TORCH_KINDS)
def test_torch_kinds(text: str) -> None:
    check(torch(text), TORCH_KINDS[text])


@needs_torch
@pytest.mark.parametrize("text", TORCH_KINDS)
def test_torch_tensors_are_not_copied(text: str) -> None:
    tensor = torch(text)
    assert as_buffer(tensor).ptr == tensor.data_ptr()


@needs_ml_dtypes
def test_bfloat16_of_ml_dtypes() -> None:
    check(ml_dtypes_bfloat16(), DType.bfloat16)


EMPTY = {
    "numpy": lambda: np.zeros(0),
    "numpy (3, 0)": lambda: np.zeros((3, 0)),
    "bytearray": bytearray,
    "dlpack (0, 3)": lambda: OnlyDLPack(np.zeros((0, 3))),
    "dlpack (3, 0)": lambda: OnlyDLPack(np.zeros((3, 0))),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_empty(kind: str) -> None:
    assert as_buffer(EMPTY[kind]()).count == 0


@needs_torch
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 2)])
def test_empty_torch(shape: tuple[int, ...]) -> None:
    assert as_buffer(torch(f"torch.empty({shape})")).count == 0


@pytest.mark.parametrize(
    "data", [np.array(3.0), OnlyDLPack(np.array(3.0))], ids=["numpy", "dlpack"]
)
def test_single_number(data: Any) -> None:
    assert read(as_buffer(data)) == [3.0]


def test_bool() -> None:
    buffer = as_buffer(np.array([False, True]))
    assert (buffer.count, buffer.dtype) == (2, DType.bool)


def test_parts() -> None:
    whole = as_buffer(numbers())
    assert [read(part) for part in whole.split([1, 0, 3, 2])] == [[0], [], [1, 2, 3], [4, 5]]
    assert all(part.keepalive is whole.keepalive for part in whole.split([3, 3]))


# ---- read-only ----------------------------------------------------------------------------------


def frozen() -> np.ndarray[Any, Any]:
    data = numbers()
    data.flags.writeable = False
    return data


READ_ONLY: dict[str, Callable[[], Any]] = {
    "bytes": lambda: bytes(6),
    "memoryview of bytes": lambda: memoryview(bytes(6)),
    "read-only memoryview": lambda: memoryview(bytearray(6)).toreadonly(),
    "numpy": frozen,
    "numpy broadcast": lambda: np.broadcast_to(np.zeros(1), (1, 1)),
    "array interface": lambda: OnlyInterface(frozen()),
    "dlpack": lambda: OnlyDLPack(frozen()),
}


@pytest.mark.parametrize("kind", READ_ONLY)
def test_read_only_memory_is_only_read(kind: str) -> None:
    data = READ_ONLY[kind]()
    with pytest.raises(ValueError) as caught:
        as_buffer(data)
    assert str(caught.value) == ("the array is read-only, but would be written. Hint: pass a copy.")
    assert as_buffer(data, writable=False).count > 0


# ---- what is refused ----------------------------------------------------------------------------

NOTHING = (
    "{} describes no memory. Hint: pass a NumPy array, a tensor with __dlpack__, or anything with "
    "the buffer protocol."
)
ALL_TYPES = ", ".join(dtype.value for dtype in DType)
ELEMENTS = f"elements of type {{}} are not supported. Hint: convert to one of {ALL_TYPES}."
SCATTERED = (
    "the buffer is not contiguous (shape {}, strides {}). Hint: pass a contiguous copy and copy "
    "the result back."
)
ELSEWHERE = (
    "the data lies on another device (DLPack device type {}). Hint: copy it to the CPU first."
)

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "list": (lambda: [1.0, 2.0], TypeError, NOTHING.format("list")),
    "None": (lambda: None, TypeError, NOTHING.format("NoneType")),
    "number": (lambda: 3, TypeError, NOTHING.format("int")),
    "text": (lambda: "text", TypeError, NOTHING.format("str")),
    "NumPy scalar": (
        lambda: np.float32(3),
        TypeError,
        "float32 is a NumPy scalar, which cannot be written. Hint: pass an array, such as "
        "np.array([value]).",
    ),
    "columns": (
        lambda: np.zeros((4, 6), np.float32)[:, ::2],
        ValueError,
        SCATTERED.format((4, 3), (24, 8)),
    ),
    "transposed": (lambda: np.zeros((4, 6)).T, ValueError, SCATTERED.format((6, 4), (8, 48))),
    "reversed": (lambda: np.zeros(3)[::-1], ValueError, SCATTERED.format((3,), (-8,))),
    "strided memoryview": (
        lambda: memoryview(bytearray(6))[::2],
        ValueError,
        SCATTERED.format((3,), (2,)),
    ),
    "array interface": (
        lambda: OnlyInterface(np.zeros(6)[::2]),
        ValueError,
        SCATTERED.format((3,), (16,)),
    ),
    "dlpack": (
        lambda: OnlyDLPack(np.zeros((4, 6)).T),
        ValueError,
        SCATTERED.format((6, 4), (1, 6)),
    ),
    "uint16": (lambda: np.zeros(3, np.uint16), TypeError, ELEMENTS.format("uint16")),
    "uint64": (lambda: np.zeros(3, np.uint64), TypeError, ELEMENTS.format("uint64")),
    "long double": (
        lambda: np.zeros(3, np.longdouble),
        TypeError,
        ELEMENTS.format(np.dtype(np.longdouble)),
    ),
    "dates": (lambda: np.zeros(3, "M8[s]"), TypeError, ELEMENTS.format("datetime64[s]")),
    "objects": (lambda: np.array([None]), TypeError, ELEMENTS.format("object")),
    "letters": (lambda: np.array(["ab"]), TypeError, ELEMENTS.format("<U2")),
    "other byte order": (lambda: np.zeros(3, ">f4"), TypeError, ELEMENTS.format(">f4")),
    "records": (
        lambda: np.zeros(3, [("a", "f4")]),
        TypeError,
        ELEMENTS.format("[('a', '<f4')]"),
    ),
    "unsigned array": (lambda: array.array("I", [1]), TypeError, ELEMENTS.format("uint32")),
    "dlpack uint16": (
        lambda: OnlyDLPack(np.zeros(3, np.uint16)),
        TypeError,
        f"elements of DLPack type (1, 16 bits) are not supported. Hint: convert to one of "
        f"{ALL_TYPES}.",
    ),
    "GPU": (lambda: OnlyDLPack(np.zeros(3), (2, 0)), TypeError, ELSEWHERE.format(2)),
    "pinned": (lambda: OnlyDLPack(np.zeros(3), (10, 1)), TypeError, ELSEWHERE.format(10)),
}
TORCH_REFUSED = {
    "torch.zeros(4, 6).t()": (ValueError, SCATTERED.format((6, 4), (1, 6))),
    "torch.zeros(6)[::2]": (ValueError, SCATTERED.format((3,), (2,))),
    "torch.zeros(1).expand(3)": (ValueError, SCATTERED.format((3,), (0,))),
    "torch.zeros(3, dtype=torch.cfloat).conj()": (ValueError, "pass tensor.resolve_conj()"),
    "torch.zeros(3, dtype=torch.cfloat).conj().imag": (ValueError, "pass tensor.resolve_neg()"),
    "torch.zeros(3).to_sparse()": (TypeError, "cannot read the memory of Tensor by DLPack"),
    "torch.zeros(3, dtype=torch.float8_e5m2)": (TypeError, "not supported"),
    "torch.zeros(3, device='meta')": (ValueError, "meta"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str) -> None:
    make, error, text = REFUSED[kind]
    with pytest.raises(error) as caught:
        as_buffer(make())
    assert str(caught.value) == text


@needs_torch
@pytest.mark.parametrize("text", TORCH_REFUSED)
def test_torch_refused(text: str) -> None:
    error, message = TORCH_REFUSED[text]
    with pytest.raises(error) as caught:
        as_buffer(torch(text))
    assert message in str(caught.value)


def test_closed_memory() -> None:
    memory = mapped()
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        as_buffer(memory)


# ---- through a group ----------------------------------------------------------------------------


def reduce_all_kinds(rank: int, world: int) -> list[str]:
    """In place, whatever the kind; and one element off the alignment, on every path."""
    group = kept_group()
    wrong = []
    for kind, (make, dtype) in KINDS.items():
        data = make()
        group.all_reduce(data)
        if read(as_buffer(data)) != [world * i for i in range(6)]:
            wrong.append(f"{kind} {dtype}")
    for count in (1000, 100_000):
        for dtype in ("float16", "float32", "float64", "complex128"):
            size = np.dtype(dtype).itemsize * count
            for memory in (bytearray(size + 1), group.allocate(size + 1)):
                data = np.frombuffer(memory, dtype, count, offset=1)
                assert not data.flags.aligned
                data[:] = rank
                group.all_reduce(data)
                if not (data == sum(range(world))).all():
                    wrong.append(f"unaligned {dtype}[{count}] {group.last_path}")
    source = bytes(100)
    group.broadcast(source if rank == 0 else bytearray(100), 0)  # the root is only read
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_kinds_in_a_group(rank_pool: Pool, world: int) -> None:
    assert rank_pool(world).run(reduce_all_kinds) == [[]] * world
