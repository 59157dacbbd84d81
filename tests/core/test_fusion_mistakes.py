"""What a fusion buffer refuses: plans and gradients that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import (
    DType,
    FusionBuffer,
    Group,
    ReduceOp,
)
from sdp_plugins.core.tensor_lists import MOST_PLANS, FusedAllReduce
from tests.core.kept_group import kept_group
from tests.core.test_fusion import KIB, f32, make
from tests.ranks import Pool

WRONG_PLANS: dict[str, tuple[Callable[[Group], object], str]] = {
    "threshold 0": (
        lambda g: make(g, [(1, "float32")], 0),
        "the threshold of a fusion buffer must be a positive multiple of 128 bytes, got 0",
    ),
    "threshold 100": (
        lambda g: make(g, [(1, "float32")], 100),
        "the threshold of a fusion buffer must be a positive multiple of 128 bytes, got 100",
    ),
    "threshold -128": (
        lambda g: make(g, [(1, "float32")], -128),
        "the threshold of a fusion buffer must be a positive multiple of 128 bytes, got -128",
    ),
    "negative size": (
        lambda g: make(g, [(3, "float32"), (-1, "float32")], 128),
        "tensor 1 cannot have -1 elements",
    ),
    "premul_sum": (
        lambda g: make(g, [(1, "float32")], 128, ReduceOp.premul_sum(2)),
        "a fusion buffer has no PREMUL_SUM. Hint: scale the gradients first.",
    ),
    "unknown reduction": (lambda g: make(g, [(1, "float32")], 128, "mean"), "unknown reduction"),
    "senseless reduction": (
        lambda g: make(g, [(1, "bool")], 128, "avg"),
        "reduction 'avg' is not defined for bool; it has: sum, product, min, max, band, bor, bxor. "
        "Hint: use one of these or convert the data first.",
    ),
}


def name_types(rank: int, world: int) -> None:
    """A type may be ours, NumPy's, or a name."""
    group = kept_group()
    tensors = [(2, DType.int8), (3, "bfloat16"), (4, np.float32), (5, np.dtype("int64")), (1, "f2")]
    fusion = FusionBuffer(group, tensors, op="sum", threshold_bytes=128)
    assert fusion.buckets == [[0], [1], [2], [3], [4]]
    wrongs: list[Any] = [
        (1, "float8"),
        (1, np.uint64),
        (1, None),
        (1, ">f4"),
        (1, {}),
        4,
        (1, 2, 3),
    ]
    for wrong in wrongs:
        with pytest.raises(TypeError, match=r"Hint: (use one of float16|describe each)"):
            FusionBuffer(group, [wrong])


def test_types_by_any_name(rank_pool: Pool) -> None:
    rank_pool(2).run(name_types)


def plan_wrongly(rank: int, world: int, case: str) -> str:
    group = kept_group()
    with pytest.raises(ValueError) as caught:
        WRONG_PLANS[case][0](group)
    group.barrier()
    return str(caught.value)


@pytest.mark.parametrize("case", WRONG_PLANS)
def test_wrong_plans(rank_pool: Pool, case: str) -> None:
    for text in rank_pool(2).run(plan_wrongly, case):
        assert text.startswith(WRONG_PLANS[case][1])


WRONG_GRADIENTS: dict[str, tuple[Callable[[FusionBuffer], object], str]] = {
    "twice": (
        lambda f: (f.ready(0, np.zeros(5, f32)), f.ready(0, np.zeros(5, f32))),
        "tensor 0 is ready a second time before finish()",
    ),
    "index": (lambda f: f.ready(2, np.zeros(5, f32)), "no tensor 2: 2 are registered"),
    "negative index": (lambda f: f.ready(-1, np.zeros(5, f32)), "no tensor -1: 2 are registered"),
    "size": (
        lambda f: f.ready(0, np.zeros(6, f32)),
        "tensor 0 was registered as float32[5], but is float32[6]",
    ),
    "type": (
        lambda f: f.ready(1, np.zeros(70, np.float64)),
        "tensor 1 was registered as float32[70], but is float64[70]",
    ),
    "read-only": (
        lambda f: f.ready(0, np.frombuffer(bytes(20), f32)),
        "the array is read-only, but would be written. Hint: pass a copy.",
    ),
}


def hand_in_wrongly(rank: int, world: int, case: str) -> str:
    """The step goes on as if nothing had been handed in."""
    fusion = make(kept_group(), [(5, "float32"), (70, "float32")], 128, "sum")
    with pytest.raises(ValueError) as caught:
        WRONG_GRADIENTS[case][0](fusion)
    good = np.ones(70, f32)
    fusion.ready(1, good)
    fusion.finish()
    assert (good == world).all()
    return str(caught.value)


def hand_in_twice(rank: int, world: int) -> None:
    """Memory of two tensors would be reduced twice; neighbours are fine."""
    fusion = make(kept_group(), [(5, "float32"), (70, "float32")], 1 * KIB, "sum")
    memory = np.ones(80, f32)
    fusion.ready(0, memory[:5])
    for start in (0, 4):
        with pytest.raises(ValueError, match="tensor 1 shares memory with another tensor of this"):
            fusion.ready(1, memory[start : start + 70])
    fusion.ready(1, memory[5:75])
    fusion.finish()
    assert (memory[:75] == world).all() and (memory[75:] == 1).all()
    fusion.ready(0, memory[5:10])  # another step
    fusion.ready(1, memory[10:])
    fusion.finish()


def test_shared_memory_is_refused(rank_pool: Pool) -> None:
    rank_pool(2).run(hand_in_twice)


@pytest.mark.parametrize("case", WRONG_GRADIENTS)
def test_wrong_gradients(rank_pool: Pool, case: str) -> None:
    text = WRONG_GRADIENTS[case][1]
    assert rank_pool(2).run(hand_in_wrongly, case) == [text, text]


def reduce_lists(rank: int, world: int) -> None:
    """A mistake on one rank sends nothing, and spoils no later list of the same sizes."""
    reduce = FusedAllReduce(kept_group())
    sizes = [40, 40, 8 * 2**20]  # the last one alone exceeds the default threshold
    for _ in range(2):
        if rank == 0:
            twice, large = np.ones(40, f32), np.ones(sizes[2], f32)
            for wrong in ([twice, twice, large], [large[:40], large[39:79], large.copy()]):
                with pytest.raises(ValueError, match="tensor 1 shares memory with tensor 0"):
                    reduce(wrong)
        good = [np.ones(size, f32) for size in sizes]
        reduce(good)
        assert all((array == world).all() for array in good)
    assert kept_group().failure is None


def test_a_wrong_list_spoils_no_later_one(rank_pool: Pool) -> None:
    rank_pool(2).run(reduce_lists)


def abandon_a_step(rank: int, world: int) -> None:
    """An exception, such as one of a backward pass, ends a step before anything is sent."""
    reduce = FusedAllReduce(kept_group())
    sizes = [(5, DType.float32), (7, DType.float32)]
    reduce.plan(sizes).ready(0, np.ones(5, f32))
    good = [np.ones(count, f32) for count, _ in sizes]
    reduce(good)
    assert all((array == world).all() for array in good)
    assert reduce.plan(sizes) is reduce.plan(sizes)


def test_an_abandoned_step_spoils_no_later_one(rank_pool: Pool) -> None:
    rank_pool(2).run(abandon_a_step)


def reduce_many_sizes(rank: int, world: int) -> None:
    reduce = FusedAllReduce(kept_group())
    first = reduce.plan([(1, DType.float32)])
    for count in range(2, MOST_PLANS + 1):
        reduce([np.ones(count, f32)])
    assert reduce.plan([(1, DType.float32)]) is first
    for count in range(MOST_PLANS + 1, 2 * MOST_PLANS):
        reduce([np.ones(count, f32)])
    assert len(reduce._fusions) == MOST_PLANS
    assert reduce.plan([(1, DType.float32)]) is first  # used later than those that were dropped


def test_plans_are_bounded(rank_pool: Pool) -> None:
    rank_pool(2).run(reduce_many_sizes)
