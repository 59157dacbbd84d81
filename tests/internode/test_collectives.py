"""Every collective across nodes, for layouts of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from sdp_plugins.core import DType, FusionBuffer, Group, ReduceOp
from tests.core import test_collectives as moves
from tests.core.test_programs import Program
from tests.core.values import (
    DTYPES,
    FACTORS,
    FOLDS,
    REDUCTIONS,
    Array,
    as_input,
    narrow,
    reduced,
    same_bits,
    tree,
    values,
    widen,
)
from tests.internode.spanning import LAYOUTS, keep_the_tree, on_node, spanning_group
from tests.ranks import Pool

SMALL, LARGE = (0, 1, 1000), (40_961, 2**20 + 3)
"""Counts for recursive multiplying and for sharded reductions; the last in several segments."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("stores"))


def by_nodes(group: Group, inputs: list[Array], dtype: str, op: str) -> Array:
    """The sum along a tree over every node's ranks, and one over the nodes."""
    parts = [widen(x, dtype) for x in inputs]
    fold = FOLDS[op]
    with np.errstate(all="ignore"):
        sums = [tree([parts[rank] for rank in members], fold) for members in group.nodes.members]
        return narrow(tree(sums, fold), dtype)


def reduce_all(rank: int, world: int, layout: str, root: str, dtype: str, count: int) -> list[str]:
    group = spanning_group(layout, root)
    assert (group.nodes.count, group.last_path) in {
        (len(set(LAYOUTS[layout])), path) for path in ("none", "hierarchical")
    }
    wrong = []
    ops = REDUCTIONS[dtype] if count < 2**20 else ("sum",)
    for op in ops:
        inputs = [values(dtype, count, r) for r in range(world)]
        keeps_tree = keep_the_tree(group.nodes)
        if not keeps_tree and op not in ("sum", "min", "max", "band", "bor", "bxor"):
            continue
        expected = (reduced if keeps_tree else partial(by_nodes, group))(inputs, dtype, op)
        how = ReduceOp.premul_sum(FACTORS[rank]) if op == "premul_sum" else op
        data = inputs[rank].copy()
        group.all_reduce(as_input(data, dtype), how)
        if not np.isnan(expected.astype(np.complex128)).any() and not same_bits(data, expected):
            wrong.append(f"all_reduce {op}")
        data = inputs[rank].copy()
        group.reduce(as_input(data, dtype), world - 1, how)
        if not same_bits(data, expected if rank == world - 1 else inputs[rank]):
            wrong.append(f"reduce {op}")
        whole = np.concatenate([np.roll(inputs[rank], shift) for shift in range(world)])
        part = np.empty_like(data)
        group.reduce_scatter(as_input(part, dtype), as_input(whole, dtype), how)
        if not same_bits(part, np.roll(expected, rank)):
            wrong.append(f"reduce_scatter {op}")
    return wrong


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [*SMALL, *LARGE])
def test_reductions(rank_pool: Pool, root: str, layout: str, count: int) -> None:
    """Bit by bit what one node gives, where the layout keeps the tree."""
    world = len(LAYOUTS[layout])
    dtypes: tuple[str, ...] = ("float32",)
    if count in (1000, 40_961):
        dtypes = DTYPES if layout in ("2x2", "1+2") else ("float32", "bfloat16", "int8")
    for dtype in dtypes:
        assert rank_pool(world).run(reduce_all, layout, root, dtype, count) == [[]] * world, dtype


REDUCING_TOO = moves.in_place, moves.in_each_others_place, moves.across


def move_all(rank: int, world: int, layout: str, root: str, dtype: str, count: int) -> list[str]:
    group = spanning_group(layout, root)
    wrong = []
    for operation in (
        moves.broadcast,
        moves.all_gather,
        moves.all_gather_uneven,
        moves.gather,
        moves.scatter,
        moves.all_to_all,
        moves.all_to_all_splits,
        *REDUCING_TOO,
    ):
        for asynchronous in (False, True):
            kind = "int64" if operation in REDUCING_TOO else dtype
            job = moves.Job(group, kind, count, asynchronous)
            cases: Iterator[tuple[str, Array, Array]] = operation(job)
            wrong += [
                f"{operation.__name__}: {case}"
                for case, got, expected in cases
                if not same_bits(got, expected)
            ]
    return wrong


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1000, 150_001])
def test_moves(rank_pool: Pool, root: str, layout: str, count: int) -> None:
    world = len(LAYOUTS[layout])
    dtype = "bfloat16" if count == 1000 else "float32"
    assert rank_pool(world).run(move_all, layout, root, dtype, count) == [[]] * world


def run_program(rank: int, world: int, layout: str, root: str) -> list[str]:
    program = Program(spanning_group(layout, root), 1)
    program.all_reduce_in_place = program.all_reduce  # type: ignore[method-assign]
    return program.run()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_program(rank_pool: Pool, root: str, layout: str) -> None:
    world = len(LAYOUTS[layout])
    assert rank_pool(world).run(run_program, layout, root) == [[]] * world


def hash_sums(rank: int, world: int, layout: str, root: str) -> list[bytes]:
    """all_reduce of the same values, by each layout's group."""
    group = spanning_group(layout, root)
    found = []
    for dtype in ("float32", "float16", "bfloat16"):
        for op in ("sum", "avg"):
            for count in (*SMALL, *LARGE):
                data = values(dtype, count, rank)
                group.all_reduce(as_input(data, dtype), op)
                found.append(data.tobytes())
    return found


def test_layouts_give_the_same_bits(rank_pool: Pool, root: str) -> None:
    """4 x 1 and 2 x 2 alike, for 16-bit floats too; 1 x 4 is what `test_reductions` expects."""
    pool = rank_pool(4)
    assert pool.run(hash_sums, "4x1", root) == pool.run(hash_sums, "2x2", root)


def name_sources(rank: int, world: int, layout: str, root: str) -> None:
    group = spanning_group(layout, root)
    for peer in range(world):
        if peer == rank:
            continue
        work = group.send(np.full(3, rank), peer, tag=1, async_op=True)
        received = group.recv(np.zeros(3, np.int64), peer, tag=1)
        assert received.source_rank == peer
        assert work is not None
        work.wait()


@pytest.mark.parametrize("layout", ["2x2", "3x1", "interleaved"])
def test_a_receive_tells_its_source(rank_pool: Pool, root: str, layout: str) -> None:
    rank_pool(len(LAYOUTS[layout])).run(name_sources, layout, root)


def fuse(rank: int, world: int, layout: str, root: str) -> list[str]:
    group = spanning_group(layout, root)
    sizes = [3, 70_001, 1, 0, 500_000, 12, 65_536]
    buffer = FusionBuffer(
        group, [(n, DType.float32) for n in sizes], op="sum", threshold_bytes=2**20
    )
    wrong = []
    for step in range(3):
        tensors = [values("float32", n, rank, step + i) for i, n in enumerate(sizes)]
        for index in reversed(range(len(sizes))):
            if index != 5:  # never ready: counts as zeros
                buffer.ready(index, tensors[index])
        before = tensors[5].copy()
        buffer.finish()
        for index, n in enumerate(sizes):
            inputs = [values("float32", n, r, step + index) for r in range(world)]
            expected = before if index == 5 else reduced(inputs, "float32", "sum")
            if not same_bits(tensors[index], expected):
                wrong.append(f"step {step} tensor {index}")
    return wrong


@pytest.mark.parametrize("layout", ["2x1", "2x2"])
def test_fusion_buffers(rank_pool: Pool, root: str, layout: str) -> None:
    world = len(LAYOUTS[layout])
    assert rank_pool(world).run(fuse, layout, root) == [[]] * world


def split(rank: int, world: int, layout: str, root: str) -> list[object]:
    """Groups of some ranks: across nodes, on one node, in another order."""
    group = spanning_group(layout, root)
    found: list[object] = []
    for members in ([0, 3], [3, 0], [2, 3], [1]):
        with on_node(LAYOUTS[layout][rank]):
            part = group.new_group(members)
        if part is None:
            continue
        with part:
            data = np.full(50_000, rank + 1.0)
            part.all_reduce(data)
            assert (data == sum(members) + len(members)).all()
            found.append((part.rank, part.local_rank, part.local_size, part.node_rank))
    return found


def test_groups_of_some_ranks(rank_pool: Pool, root: str) -> None:
    assert rank_pool(4).run(split, "2x2", root) == [
        [(0, 0, 1, 0), (1, 0, 1, 1)],
        [(0, 0, 1, 0)],
        [(0, 0, 2, 0)],
        [(1, 0, 1, 1), (0, 0, 1, 0), (1, 1, 2, 0)],
    ]


def use_registered(rank: int, world: int, layout: str, root: str) -> list[str]:
    """In memory that this node's ranks map, steps copy nothing; some may have other memory."""
    group = spanning_group(layout, root)
    count = 700_001
    memory = np.frombuffer(group.allocate(4 * count * world), np.float32)
    wrong = []
    for mixed in (False, True):
        private = np.empty_like(memory) if mixed and rank % 2 else memory
        inputs = [values("float32", count, r) for r in range(world)]
        expected = by_nodes(group, inputs, "float32", "sum")
        place = private[:count]
        place[:] = inputs[rank]
        group.all_reduce(place)
        if not same_bits(place, expected):
            wrong.append(f"all_reduce, mixed {mixed}")
        output = private[: count * world]
        output[rank * count : (rank + 1) * count] = inputs[rank]
        group.all_gather(output, output[rank * count : (rank + 1) * count])
        if not same_bits(output, np.concatenate(inputs)):
            wrong.append(f"all_gather, mixed {mixed}")
        part = np.empty(count, np.float32)
        output[:] = np.concatenate([np.roll(inputs[rank], shift) for shift in range(world)])
        group.reduce_scatter(part, output)
        if not same_bits(part, np.roll(expected, rank)):
            wrong.append(f"reduce_scatter, mixed {mixed}")
        root_of_all = world - 1
        place[:] = inputs[rank]
        group.broadcast(place, root_of_all)
        if not same_bits(place, inputs[root_of_all]):
            wrong.append(f"broadcast, mixed {mixed}")
    return wrong


@pytest.mark.parametrize("layout", ["1+2", "2x2", "3+1"])
def test_registered_memory(rank_pool: Pool, root: str, layout: str) -> None:
    world = len(LAYOUTS[layout])
    assert rank_pool(world).run(use_registered, layout, root) == [[]] * world
