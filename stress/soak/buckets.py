"""Registered memory: shared buckets with short lives, and DDP's, which move automatically."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.torch import share
from stress.soak.data import fill, raw
from stress.soak.turn import Started, Turn
from tests.core.values import Array, tree

KEPT_ELEMENTS = 2**19  # 2 MiB of float32


def shared_bucket(turn: Turn) -> Started:
    """Create, share and drop a bucket; reduce it several times, possibly with a swap in between."""
    dtype = turn.dtype(("float32", "float64", "bfloat16", "int32"))
    size = turn.empty(dtype).itemsize
    count = turn.plan.randrange(2**20 // size, 3 * 2**20 // size)
    bucket = turn.blank(dtype, count)
    share(bucket, turn.group)
    swapped_at = turn.plan.randrange(8)
    for turns in range(turn.plan.randrange(1, 4)):
        if turns == swapped_at:  # this invalidates its memory and its registration
            bucket.set_(turn.blank(dtype, count))  # type: ignore[call-overload]
        reduce_into(turn, bucket, dtype, count, turns)
    return Started(None, lambda: None)


def reduce_into(turn: Turn, bucket: Tensor, dtype: str, count: int, turns: int) -> None:
    inputs = [turn.values(dtype, count, r, turns) for r in turn.everyone]
    fill(bucket, inputs[turn.rank])
    work = dist.all_reduce(bucket, group=turn.group, async_op=turn.asynchronous)
    if work is not None:
        work.wait()
    turn.equal(bucket, turn.reduced(dtype, "sum", inputs), "a bucket")


def kept_bucket(turn: Turn) -> Started:
    """Reduce a part of the group's own bucket asynchronously; it lives as long as the group."""
    fresh = "bucket" not in turn.live.kept
    if fresh:
        bucket = turn.live.kept["bucket"] = torch.zeros(KEPT_ELEMENTS)
        share(bucket, turn.group)
    begin = turn.plan.randrange(0, KEPT_ELEMENTS // 2)
    count = turn.plan.randrange(1, KEPT_ELEMENTS // 2)
    part = turn.live.kept["bucket"][begin : begin + count]
    busy = turn.live.kept.pop("busy", None)
    if busy is not None:  # the previous operation may use this memory
        busy.wait()
    inputs = [turn.values("float32", count, r) for r in turn.everyone]
    fill(part, inputs[turn.rank])
    work = dist.all_reduce(part, group=turn.group, async_op=turn.asynchronous)
    result = work.get_future().then(lambda f: f.value() and part.clone()) if work else None
    turn.live.kept["busy"] = result

    def check() -> None:
        found = part if result is None else result.value()
        turn.equal(found, turn.reduced("float32", "sum", inputs), "the group's bucket")

    if result is None:
        check()
        return Started(None, lambda: None)
    return Started(result, check)


class Weights(nn.Module):
    """A module whose gradients are the inputs."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(n) for n in counts)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return torch.stack([(w * x).sum() for w, x in zip(self.parts, inputs, strict=True)]).sum()


def ddp(turn: Turn) -> Started:
    """Run steps of DistributedDataParallel, with buckets that register themselves."""
    counts = [turn.plan.randrange(1, 4 * 10**5) for _ in range(turn.plan.randrange(1, 4))]
    model = DistributedDataParallel(
        Weights(counts),
        process_group=turn.group,
        bucket_cap_mb=turn.plan.choice((1, 25)),
        gradient_as_bucket_view=turn.plan.random() < 0.5,
    )
    for step in range(turn.plan.randrange(1, 5)):
        inputs = [[turn.values("float32", n, r, step, n) for n in counts] for r in turn.everyone]
        model.zero_grad(set_to_none=turn.plan.random() < 0.5)
        model([torch.from_numpy(np.array(x)) for x in inputs[turn.rank]]).backward()
        for i, weights in enumerate(model.module.parts):
            ways = averaged([of[i] for of in inputs])
            turn.equal(weights.grad, ways.get(raw(weights.grad), ways[b""]), "a gradient")
    return Started(None, lambda: None)


def averaged(parts: list[Array]) -> dict[bytes, Array]:
    """Return the averages by DDP's two methods: multiply or divide the gradients, then sum."""
    n = np.float32(len(parts))
    multiplied = tree([part * np.float32(1 / n) for part in parts], np.add)
    divided = tree([part / n for part in parts], np.add)
    return {b"": multiplied, divided.tobytes(): divided}
