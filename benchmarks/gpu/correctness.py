"""In a rank: device tensors must become, bit by bit, what CPU tensors become."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.collectives import COLLECTIVES
from benchmarks.gpu.plan import GLOO_DEVICES
from benchmarks.gpu.task import Rank

DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "bool")
OPS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT")
FREQUENT = ("SUM", "AVG")  # what is checked in large tensors
STRIDED = "float32"  # whose large tensors are checked with gaps too
REFUSALS = (TypeError, ValueError, RuntimeError)
ENOUGH = 3  # failures after which the others say nothing new


@dataclass
class Verdict:
    """What a comparison found.

    Attributes:
        equal: Number of cases with the same bits.
        refused: Cases that are refused on both devices.
        wrong: Cases that differ, in words.
    """

    equal: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, case: str, expected: Any, found: Any) -> None:
        """Compare the results of a call on the CPU and on the device: tensors or errors."""
        if isinstance(expected, Exception) and isinstance(found, Exception):
            self.refused.append(case)
        elif isinstance(expected, Exception) or isinstance(found, Exception):
            one, other = (x if isinstance(x, Exception) else "a result" for x in (expected, found))
            self.wrong.append(f"{case}: CPU: {one!r}, device: {other!r}"[:300])
        elif same_bits(expected, found):
            self.equal += 1
        else:
            self.wrong.append(f"{case}: other bits")


def same_bits(expected: list[Tensor], found: list[Tensor]) -> bool:
    """Return whether tensors on two devices hold the same bytes."""
    pairs = zip(expected, (tensor.cpu() for tensor in found), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def attempt(call: Callable[..., list[Tensor]], *arguments: Any) -> Any:
    """Return the tensors of a call, or its error."""
    try:
        return call(*arguments)
    except REFUSALS as error:
        return error


def values(dtype: str, count: int, rank: int) -> Tensor:
    """Return a rank's random values, among which products stay finite for long."""
    generator = torch.Generator().manual_seed(rank + 1)
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point:
        return (3 * torch.rand(count, generator=generator) - 1.5).to(kind)
    top = 2 if kind is torch.bool else 100
    return torch.randint(top, (count,), generator=generator).to(kind)


def all_reduces(rank: Rank, small: list[int], large: list[int], strided: bool) -> dict[str, Any]:
    """Check all_reduce with every dtype and reduction; sizes are bytes, or elements below 4096."""
    verdict = Verdict()
    for dtype in DTYPES:
        itemsize = getattr(torch, dtype).itemsize
        counts = {size: size if size < 4096 else size // itemsize for size in (*small, *large)}
        longest = max(2 * max(counts[n] for n in small), *(counts[n] for n in large))
        longest *= 2 if strided else 1
        base = values(dtype, longest, rank.place.rank)
        for size, op in _cases(dtype, small, large, strided):
            if len(verdict.wrong) >= ENOUGH:
                return asdict(verdict)
            whole = base[: 2 * counts[size] if strided else counts[size]]
            case = f"all_reduce {dtype}[{counts[size]}] {op}{' strided' if strided else ''}"
            results = [
                attempt(_all_reduced, rank, each, op, strided)
                for each in (whole.clone(), whole.to(rank.device.torch, copy=True))
            ]
            verdict.add(case, *results)
    return asdict(verdict)


def _cases(
    dtype: str, small: list[int], large: list[int], strided: bool
) -> Iterator[tuple[int, str]]:
    yield from ((size, op) for size in small for op in OPS)
    if dtype == STRIDED or not strided:
        yield from ((size, op) for size in large for op in FREQUENT)


def _all_reduced(rank: Rank, whole: Tensor, op: str, strided: bool) -> list[Tensor]:
    """Reduce all elements or every other one; the elements between must stay as they are."""
    part = whole[::2] if strided else whole
    dist.all_reduce(part, getattr(dist.ReduceOp, op), group=rank.group)
    return [whole]


def collectives(rank: Rank, sizes: list[int]) -> dict[str, Any]:
    """Check the other collectives; sizes are elements of each rank's part."""
    verdict, place = Verdict(), rank.place
    for dtype in ("float32", "bfloat16", "int64"):
        for size in sizes:
            whole = values(dtype, size * place.ranks, place.rank)
            for name, call in COLLECTIVES.items():
                if len(verdict.wrong) >= ENOUGH:
                    return asdict(verdict)
                results = [
                    attempt(call, each, place.rank, place.ranks, rank.group)
                    for each in (whole.clone(), whole.to(rank.device.torch, copy=True))
                ]
                verdict.add(f"{name} {dtype}[{size}]", *results)
    return asdict(verdict)


def streams(rank: Rank, count: int, busy: int, repeats: int) -> dict[str, Any]:
    """Check that a reduction waits for what fills the tensor, and that readers wait for it.

    Args:
        rank: This rank.
        count: Elements of the tensor.
        busy: Side of the matrices whose product delays what fills the tensor.
        repeats: How often.
    """
    verdict = Verdict()
    filled = values("float32", count, rank.place.rank)
    expected = filled.clone()
    dist.all_reduce(expected, group=rank.group)
    source = filled.to(rank.device.torch)
    matrix = torch.ones(busy, busy, device=rank.device.torch)
    side = rank.device.stream()

    def late() -> Tensor:
        tensor = torch.zeros_like(source)
        for _ in range(8):
            matrix @ matrix
        return tensor.copy_(source)

    def blocking() -> list[Tensor]:
        dist.all_reduce(tensor := late(), group=rank.group)
        return [tensor.clone()]

    def on_side_stream() -> list[Tensor]:
        with rank.device.using(side):
            return blocking()

    def asynchronous() -> list[Tensor]:
        work = dist.all_reduce(tensor := late(), group=rank.group, async_op=True)
        matrix @ matrix
        work.wait()
        return [tensor.clone()]

    def dropped_by_the_first_rank() -> list[Tensor]:
        work = dist.all_reduce(tensor := late(), group=rank.group, async_op=True)
        if rank.place.rank == 0:
            del work, tensor
            torch.empty_like(source).fill_(-1.0)  # gets the memory if nobody holds it
            return [expected]
        work.wait()
        return [tensor.clone()]

    for call in (blocking, on_side_stream, asynchronous, dropped_by_the_first_rank):
        for _ in range(repeats):
            found = attempt(call)
            rank.device.synchronize()
            verdict.add(f"streams: {call.__name__}", [expected], found)
    return asdict(verdict)


def ddp_like_gloo(rank: Rank, steps: int, width: int) -> dict[str, Any]:
    """Train equal models under DDP over this backend and over gloo, and compare their weights.

    If gloo does not take the device's tensors, its model is on the CPU: right for a simulated
    device, which computes there.
    """
    there = rank.device.torch if rank.device.kind in GLOO_DEVICES else torch.device("cpu")
    one = _trained(rank, rank.group, rank.device.torch, steps, width)
    other = _trained(rank, dist.group.WORLD, there, steps, width)
    return {
        "equal": same_bits([one], [other]),
        "largest_difference": (one - other).abs().max().item(),
        "weights": hashlib.sha256(one.numpy().tobytes()).hexdigest(),
    }


def _trained(rank: Rank, group: Any, device: torch.device, steps: int, width: int) -> Tensor:
    """Return all weights after some steps, on the CPU."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(width, 8)).to(device)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank.place.rank)
        batch = torch.rand(32, 64, generator=generator).to(device)
        ddp(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
