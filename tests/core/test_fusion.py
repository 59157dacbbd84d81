"""Fusion buffers give what an all_reduce of each tensor gives, whatever the sizes and orders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import (
    CollectiveMismatchError,
    DType,
    FusionBuffer,
    Group,
    PeerLostError,
    SdpError,
)
from tests.core.failing import NOTICE_S, now
from tests.core.kept_group import kept_group, settings
from tests.core.values import Array, as_input, same_bits, values
from tests.ranks import Pool

Spec = tuple[int, str]
KIB = 1024
# What is registered, and the threshold in bytes.
PLANS: dict[str, tuple[list[Spec], int]] = {
    "one": ([(1000, "float32")], 25 * 2**20),
    "none": ([], 128),
    "all in one buffer": ([(n, "float32") for n in (1, 7, 1000, 3, 40_000)], 2**20),
    "many buffers": ([(100 + 13 * i, "float32") for i in range(60)], 4 * KIB),
    "one buffer each": ([(32, "float32")] * 20, 128),
    "large ones": ([(n, "float32") for n in (50, 30_000, 60, 100_000, 25_000, 70)], 100 * KIB),
    "as large as the threshold": ([(n, "float32") for n in (32, 31, 32, 33, 1)], 128),
    "empty ones": ([(0, "float32"), (5, "float32"), (0, "float32"), (0, "int64")], 1 * KIB),
    "nothing but empty ones": ([(0, "float32")] * 3, 1 * KIB),
    "mixed types": (
        [
            (300 + i, ("float32", "bfloat16", "float16", "float64", "int64", "int8")[i % 6])
            for i in range(40)
        ],
        2 * KIB,
    ),
    "mixed types, large": (
        [(30_000, "float32"), (99, "bfloat16"), (80_000, "bfloat16"), (10, "float32")],
        64 * KIB,
    ),
}
ORDERS: dict[str, Callable[[int, int, int], Sequence[int]]] = {
    "as registered": lambda n, rank, step: range(n),
    "reversed": lambda n, rank, step: range(n)[::-1],
    "another on each rank": lambda n, rank, step: np.random.default_rng((rank, step)).permutation(
        n
    ),
}


def gradients(specs: list[Spec], rank: int, step: int) -> list[Array]:
    return [values(dtype, n, rank, 100 * step + i) for i, (n, dtype) in enumerate(specs)]


def make(group: Group, specs: list[Spec], threshold: int | None, op: Any = "avg") -> FusionBuffer:
    registered = [(n, DType(dtype)) for n, dtype in specs]
    return FusionBuffer(group, registered, op=op, threshold_bytes=threshold)


def expected(group: Group, specs: list[Spec], mine: list[Array], op: str) -> list[Array]:
    """By one all_reduce per tensor."""
    copies = [array.copy() for array in mine]
    for (_, dtype), array in zip(specs, copies, strict=True):
        group.all_reduce(as_input(array, dtype), op)
    return copies


def train(rank: int, world: int, plan: str, order: str, op: str) -> list[str]:
    """Several steps; tensors that did not get what they should."""
    specs, threshold = PLANS[plan]
    group = kept_group()
    fusion = make(group, specs, threshold, op)
    assert sorted(i for bucket in fusion.buckets for i in bucket) == list(range(len(specs)))
    wrong = []
    for step in range(4):
        mine = gradients(specs, rank, step)
        want = expected(group, specs, mine, op)
        for i in ORDERS[order](len(specs), rank, step):
            fusion.ready(int(i), as_input(mine[i], specs[i][1]))
        fusion.finish()
        wrong += [
            f"step {step}: tensor {i}, {specs[i]}"
            for i in range(len(specs))
            if not same_bits(mine[i], want[i])
        ]
    return wrong


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("plan", PLANS)
def test_equals_an_all_reduce_of_each(rank_pool: Pool, plan: str, order: str) -> None:
    assert rank_pool(2).run(train, plan, order, "avg") == [[], []]


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_other_worlds_and_reductions(rank_pool: Pool, world: int, op: str) -> None:
    for plan in ("mixed types", "large ones"):
        order = "another on each rank"
        assert rank_pool(world).run(train, plan, order, op) == [[]] * world


def plan_buckets(rank: int, world: int, plan: str) -> list[list[int]]:
    specs, threshold = PLANS[plan]
    return make(kept_group(), specs, threshold).buckets


BUCKETS = {
    "all in one buffer": [[0, 1, 2, 3, 4]],
    "as large as the threshold": [[0], [1], [2], [3], [4]],
    "large ones": [[0], [1], [2], [3], [4, 5]],
    "empty ones": [[0, 1, 2], [3]],
    "none": [],
}


@pytest.mark.parametrize("plan", BUCKETS)
def test_buckets(rank_pool: Pool, plan: str) -> None:
    assert rank_pool(2).run(plan_buckets, plan) == [BUCKETS[plan]] * 2


def default_threshold(rank: int, world: int) -> list[list[list[int]]]:
    """25 MiB, or SDP_FUSION_MB."""
    specs = [(2**18, "float32")] * 30  # 1 MiB each
    found = [make(kept_group(), specs, None).buckets]
    with settings(SDP_FUSION_MB="10"):
        found.append(make(kept_group(), specs, None).buckets)
    return found


def test_default_threshold(rank_pool: Pool) -> None:
    tensors = list(range(30))
    expected = [[tensors[:25], tensors[25:]], [tensors[:10], tensors[10:20], tensors[20:]]]
    assert rank_pool(1).run(default_threshold) == [expected]


# ---- tensors that are never ready ---------------------------------------------------------------


def skip(rank: int, world: int, plan: str) -> list[str]:
    """A tensor that is not ready counts as zeros and is not written; the next step is complete."""
    specs, threshold = PLANS[plan]
    group = kept_group()
    fusion = make(group, specs, threshold, "sum")
    wrong = []
    for step in range(3):
        # Some on no rank, some on one rank only, all on the last step.
        used = [step == 2 or (i % 3 > 0 and (i + rank) % 4 > 0) for i in range(len(specs))]
        mine = gradients(specs, rank, step)
        given = [x if use else np.zeros_like(x) for x, use in zip(mine, used, strict=True)]
        want = expected(group, specs, given, "sum")
        before = [x.copy() for x in mine]
        for i, use in enumerate(used):
            if use:
                fusion.ready(i, as_input(mine[i], specs[i][1]))
        fusion.finish()
        for i, use in enumerate(used):
            if not same_bits(mine[i], want[i] if use else before[i]):
                wrong.append(f"step {step}: tensor {i}, {specs[i]}, {'used' if use else 'skipped'}")
    return wrong


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_never_ready(rank_pool: Pool, plan: str, world: int) -> None:
    assert rank_pool(world).run(skip, plan) == [[]] * world


# ---- overlap ------------------------------------------------------------------------------------


def overlap(rank: int, world: int) -> tuple[bool, list[str]]:
    """Buffers leave while later tensors are not ready; many in flight; two threads hand in."""
    group = kept_group()
    specs = [(5000, "float32")] * 64
    fusion = make(group, specs, 20 * KIB, "sum")
    early = False
    wrong = []
    for step in range(5):
        mine = [np.full(n, float(rank + i + step), np.float32) for i, (n, _) in enumerate(specs)]
        if step == 0:
            fusion.ready(0, mine[0])
            end = now() + 10
            while not early and now() < end:
                early = bool(mine[0][-1] == sum(r for r in range(world)))
                time.sleep(0.001)
        rest = range(1 if step == 0 else 0, 64)

        def hand_in(half: Sequence[int], arrays: list[Array] = mine) -> None:
            for i in half:
                fusion.ready(i, arrays[i])

        threads = [threading.Thread(target=hand_in, args=(rest[k::2],)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        other = np.ones(3)
        group.all_reduce(other)  # behind them
        if not (other == world).all():
            wrong.append(f"step {step}: other")
        fusion.finish()
        for i in range(64):
            if not (mine[i] == sum(r + i + step for r in range(world))).all():
                wrong.append(f"step {step} tensor {i}")
    return early, wrong


@pytest.mark.parametrize("world", [2, 4])
def test_buffers_leave_while_others_fill(rank_pool: Pool, world: int) -> None:
    assert rank_pool(world).run(overlap) == [(True, [])] * world


def two_at_once(rank: int, world: int) -> list[str]:
    """Two fusion buffers of one group, in the same order on all ranks, and idle finishes."""
    group = kept_group()
    specs = PLANS["many buffers"][0]
    first, second = (make(group, specs, 4 * KIB, "sum") for _ in range(2))
    wrong = []
    for step in range(3):
        ours = [gradients(specs, rank, 10 * step + k) for k in range(2)]
        want = [expected(group, specs, mine, "sum") for mine in ours]
        for fusion, mine in zip((first, second), ours, strict=True):
            for i, array in enumerate(mine):
                fusion.ready(i, array)
        second.finish()
        first.finish()
        for k in range(2):
            if not all(map(same_bits, ours[k], want[k])):
                wrong.append(f"step {step} buffer {k}")
    return wrong


def test_two_fusion_buffers(rank_pool: Pool) -> None:
    assert rank_pool(2).run(two_at_once) == [[], []]


# ---- calls that are wrong -----------------------------------------------------------------------

f32 = np.float32


# ---- what goes wrong ----------------------------------------------------------------------------


def fail_in_flight(rank: int, world: int) -> None:
    """The first cause comes out of finish, and of everything after it."""
    with Group.from_env(timeout_s=30) as group:
        specs = [(5000, "float32")] * 8
        fusion = make(group, specs, 4 * KIB)
        mine = [np.zeros(5000, f32) for _ in specs]
        for i, array in enumerate(mine[:4]):
            fusion.ready(i, array)
        if rank == 1:
            time.sleep(0.2)
            group.abort("a test")
        start = now()
        for call in (
            fusion.finish,
            fusion.finish,
            lambda: fusion.ready(5, mine[5]),
            lambda: make(group, specs, 128),
        ):
            with pytest.raises(PeerLostError, match="a test"):
                call()
        assert now() - start < NOTICE_S
        group.close()
        with pytest.raises(SdpError, match="the group is closed"):
            fusion.finish()


def test_failure_in_flight(rank_pool: Pool) -> None:
    rank_pool(3).run(fail_in_flight)


def plan_differently(rank: int, world: int) -> str:
    with Group.from_env(timeout_s=30) as group:
        fusion = make(group, [(5, "float32"), (7 + rank, "float32")], 128, "sum")
        data = np.full(7 + rank, 3, f32)
        fusion.ready(0, np.zeros(5, f32))
        fusion.ready(1, data)
        with pytest.raises(CollectiveMismatchError) as caught:
            fusion.finish()
        assert (data == 3).all()
        return str(caught.value)


def test_plans_that_differ(rank_pool: Pool) -> None:
    for rank, text in enumerate(rank_pool(2).run(plan_differently)):
        assert text.startswith(f"[rank {rank}/2] all_reduce #") and "ranks disagree: rank 0" in text


def drop(rank: int, world: int, pause_s: float) -> float:
    """A program that fails between ready and finish must not wait for its peers.

    Its peer reads why, whether or not the engine has announced the operation before.
    """
    group = Group.from_env(timeout_s=30)
    group.barrier()
    if rank == 0:
        fusion = make(group, [(50_000, "float32")], 4 * KIB)
        fusion.ready(0, np.zeros(50_000, f32))
        time.sleep(pause_s)
        start = now()
        del fusion
        took = now() - start
        said = "all_reduce float32[50000] avg: a fusion buffer was dropped before its finish() was"
        assert str(group.failure) == f"[rank 0/2] {said} called. Hint: make a new group."
    else:
        time.sleep(pause_s + 0.5)
        start = now()
        with pytest.raises(PeerLostError, match=r"rank 0 gave up: all_reduce .* dropped before"):
            group.barrier()
        took = now() - start
    group.close()
    return took


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
def test_dropped_before_finish(rank_pool: Pool, pause_s: float) -> None:
    assert max(rank_pool(2).run(drop, pause_s)) < NOTICE_S


def drop_beside_a_waiting_thread(rank: int, world: int) -> None:
    """The engine waits for a thread's operation, which needs the interpreter to notice the end."""
    group = Group.from_env(timeout_s=30)
    group.barrier()
    if rank == 0:
        fusion = make(group, [(50_000, "float32")], 4 * KIB)

        def wait() -> None:
            with pytest.raises(PeerLostError):
                group.barrier()

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.3)
        fusion.ready(0, np.zeros(50_000, f32))
        del fusion
        waiting.join()
    else:
        time.sleep(0.6)
        with suppress(PeerLostError):  # rank 0 has come to this one
            group.barrier()
        with pytest.raises(PeerLostError):
            group.barrier()
    group.close()


def test_dropped_beside_a_waiting_thread(rank_pool: Pool) -> None:
    rank_pool(2).run(drop_beside_a_waiting_thread)


def forget(rank: int, world: int) -> None:
    """Without operations in flight nothing happens, whichever goes first."""
    for first in ("group", "fusion"):
        held = {"group": Group.from_env(name=first, timeout_s=30)}
        held["fusion"] = make(held["group"], [(50_000, "float32")] * 3, 256 * KIB)
        gradient = np.zeros(50_000, f32)
        for step in range(2):
            held["fusion"].ready(step, gradient)
            held["fusion"].finish()
        del held[first]
        held.clear()


def test_dropped_in_any_order(rank_pool: Pool) -> None:
    rank_pool(2).run(forget)
