"""The collectives that move elements: who gets what from whom, for every root, split and size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from sdp_plugins.core import Group, Work
from tests.core.kept_group import kept_group
from tests.core.values import Array, as_input, reduced, same_bits, storage, values
from tests.ranks import Pool, run_ranks

Outcome = tuple[str, Array, Array]  # case, got, expected
WORLDS = (1, 2, 3, 4)
DTYPES = ("uint8", "bfloat16", "float32", "int64", "complex128")  # one of each size
COUNTS = (0, 1, 7, 1000, 40_961)
LARGE = 2**20 + 3
HUGE = 2**31 + 3
GIB = 2**30


def done(work: Work | None) -> None:
    """Wait for what was issued with async_op=True."""
    if work is not None:
        work.wait()


def empty(count: int, dtype: str) -> Array:
    return np.full(count, 77, storage(dtype))


class Job:
    """One rank's view of a case: its group and how to call it."""

    def __init__(self, group: Group, dtype: str, count: int, asynchronous: bool) -> None:
        self.group, self.dtype, self.count = group, dtype, count
        self.how = {"async_op": asynchronous}
        self.rank, self.world = group.rank, group.world_size
        self.ranks = range(self.world)

    def part(self, src: int, dst: int = 0, count: int | None = None) -> Array:
        """What `src` has for `dst`."""
        return values(self.dtype, self.count if count is None else count, src, dst)

    def whole(self, src: int) -> Array:
        return np.concatenate([self.part(src, dst) for dst in self.ranks])

    def length(self, src: int, dst: int = 0) -> int:
        """Uneven: some are empty, some twice as long."""
        return self.count * ((src + 2 * dst) % 3)

    def give(self, array: Array) -> Any:
        return as_input(array, self.dtype)

    def room(self, count: int) -> Array:
        return empty(count, self.dtype)


def broadcast(job: Job) -> Iterator[Outcome]:
    for root in job.ranks:
        data = job.part(job.rank)
        done(job.group.broadcast(job.give(data), root, **job.how))
        yield f"root {root}", data, job.part(root)


def all_gather(job: Job) -> Iterator[Outcome]:
    output = job.room(job.count * job.world)
    expected = np.concatenate([job.part(src) for src in job.ranks])
    done(job.group.all_gather(job.give(output), job.give(job.part(job.rank)), **job.how))
    yield "apart", output, expected
    output = job.room(job.count * job.world)
    mine = output[job.rank * job.count : (job.rank + 1) * job.count]
    mine[:] = job.part(job.rank)
    done(job.group.all_gather(job.give(output), job.give(mine), **job.how))
    yield "in place", output, expected


def all_gather_uneven(job: Job) -> Iterator[Outcome]:
    outputs = [job.room(job.length(src)) for src in job.ranks]
    mine = job.part(job.rank, 0, job.length(job.rank))
    done(job.group.all_gather_uneven([job.give(x) for x in outputs], job.give(mine), **job.how))
    for src in job.ranks:
        yield f"from {src}", outputs[src], job.part(src, 0, job.length(src))


def gather(job: Job) -> Iterator[Outcome]:
    for root in job.ranks:
        mine = job.part(job.rank, 0, job.length(job.rank, root))
        outputs = [job.room(job.length(src, root)) for src in job.ranks]
        given = [job.give(x) for x in outputs] if job.rank == root else None
        done(job.group.gather(given, job.give(mine), root, **job.how))
        for src in job.ranks if job.rank == root else ():
            expected = job.part(src, 0, job.length(src, root))
            yield f"root {root} from {src}", outputs[src], expected


def scatter(job: Job) -> Iterator[Outcome]:
    for root in job.ranks:
        output = job.room(job.length(root, job.rank))
        inputs = [job.part(root, dst, job.length(root, dst)) for dst in job.ranks]
        given = [job.give(x) for x in inputs] if job.rank == root else None
        done(job.group.scatter(job.give(output), given, root, **job.how))
        yield f"root {root}", output, inputs[job.rank]


def all_to_all(job: Job) -> Iterator[Outcome]:
    output = job.room(job.count * job.world)
    done(job.group.all_to_all(job.give(output), job.give(job.whole(job.rank)), **job.how))
    yield "equal", output, np.concatenate([job.part(src, job.rank) for src in job.ranks])


def all_to_all_splits(job: Job) -> Iterator[Outcome]:
    to = [job.length(job.rank, dst) for dst in job.ranks]
    by = [job.length(src, job.rank) for src in job.ranks]
    mine = np.concatenate([job.part(job.rank, dst, to[dst]) for dst in job.ranks])
    output = job.room(sum(by))
    done(job.group.all_to_all(job.give(output), job.give(mine), by, to, **job.how))
    expected = np.concatenate([job.part(src, job.rank, by[src]) for src in job.ranks])
    yield "splits", output, expected


def all_to_all_pieces(job: Job) -> Iterator[Outcome]:
    inputs = [job.part(job.rank, dst, job.length(job.rank, dst)) for dst in job.ranks]
    outputs = [job.room(job.length(src, job.rank)) for src in job.ranks]
    given = [[job.give(x) for x in arrays] for arrays in (outputs, inputs)]
    done(job.group.all_to_all_pieces(*given, **job.how))
    for src in job.ranks:
        expected = job.part(src, job.rank, job.length(src, job.rank))
        yield f"pieces from {src}", outputs[src], expected


def in_place(job: Job) -> Iterator[Outcome]:
    """A rank's own part of input and output is the same memory."""
    n, rank = job.count, job.rank
    root = job.world - 1
    output = job.room(n * job.world)
    parts = np.split(output, job.world)
    parts[rank][:] = job.part(rank)
    outputs = [job.give(part) for part in parts]
    done(job.group.gather(outputs if rank == root else None, outputs[rank], root, **job.how))
    if rank == root:
        yield "gather", output, np.concatenate([job.part(src) for src in job.ranks])
    inputs = job.whole(root)
    mine = np.split(inputs, job.world)[rank] if rank == root else job.room(n)
    given = [job.give(part) for part in np.split(inputs, job.world)]
    done(job.group.scatter(job.give(mine), given if rank == root else None, root, **job.how))
    yield "scatter", mine, job.part(root, rank)
    data = job.whole(rank)
    done(job.group.all_to_all(job.give(data), job.give(data), **job.how))
    yield "all_to_all", data, np.concatenate([job.part(src, rank) for src in job.ranks])
    data = job.whole(rank)
    mine = np.split(data, job.world)[rank]
    done(job.group.reduce_scatter(job.give(mine), job.give(data), **job.how))
    yield "reduce_scatter", mine, summed(job)


def in_each_others_place(job: Job) -> Iterator[Outcome]:
    """Outputs lie where inputs for other ranks lie."""
    n, rank = job.count, job.rank
    root, other = job.world - 1, (job.rank + 1) % job.world
    everyone = np.concatenate([job.part(src) for src in job.ranks])
    exchanged = np.concatenate([job.part(src, rank) for src in job.ranks])
    for how in "all_gather", "gather":
        output = job.room(n * job.world)
        parts = np.split(output, job.world)
        parts[other][:] = job.part(rank)
        mine = job.give(parts[other])
        if how == "all_gather":
            done(job.group.all_gather(job.give(output), mine, **job.how))
        else:
            outputs = [job.give(part) for part in parts] if rank == root else None
            done(job.group.gather(outputs, mine, root, **job.how))
        if how == "all_gather" or rank == root:
            yield how, output, everyone
    inputs = np.split(job.whole(root), job.world)
    given = [job.give(part) for part in inputs] if rank == root else None
    done(job.group.scatter(job.give(inputs[other]), given, root, **job.how))
    yield "scatter", inputs[other], job.part(root, rank)
    parts = np.split(job.whole(rank), job.world)
    given = [job.give(part) for part in parts]
    done(job.group.all_to_all_pieces(given[::-1], given, **job.how))
    yield "all_to_all_pieces", np.concatenate(parts[::-1]), exchanged
    data = job.whole(rank)
    mine = np.split(data, job.world)[other]
    done(job.group.reduce_scatter(job.give(mine), job.give(data), **job.how))
    yield "reduce_scatter", mine, summed(job)


def across(job: Job) -> Iterator[Outcome]:
    """Outputs lie one element beside the inputs."""
    n, rank, size = job.count, job.rank, job.count * job.world
    for shift in (0, 1) if n else ():
        room = job.room(size + 1)
        data, output = room[shift : shift + size], room[1 - shift :][:size]
        data[:] = job.whole(rank)
        done(job.group.all_to_all(job.give(output), job.give(data), **job.how))
        expected = np.concatenate([job.part(src, rank) for src in job.ranks])
        yield f"all_to_all {shift}", output, expected
        data[:] = job.whole(rank)
        mine = output[rank * n : (rank + 1) * n]
        done(job.group.reduce_scatter(job.give(mine), job.give(data), **job.how))
        yield f"reduce_scatter {shift}", mine, summed(job)


def summed(job: Job) -> Array:
    """What this rank gets of a reduce_scatter."""
    return reduced([job.part(src, job.rank) for src in job.ranks], job.dtype, "sum")


def barrier(job: Job) -> Iterator[Outcome]:
    done(job.group.barrier(**job.how))
    yield "", np.zeros(0), np.zeros(0)


COLLECTIVES = {
    f.__name__: f
    for f in (
        broadcast,
        all_gather,
        all_gather_uneven,
        gather,
        scatter,
        all_to_all,
        all_to_all_splits,
        all_to_all_pieces,
        in_place,
        in_each_others_place,
        across,
        barrier,
    )
}


def check(rank: int, world: int, name: str, dtypes: Any, counts: Any) -> list[str]:
    """Cases that did not give what they should."""
    wrong = []
    for dtype in dtypes:
        for count in counts:
            for asynchronous in (False, True):
                job = Job(kept_group(), dtype, count, asynchronous)
                for case, got, expected in COLLECTIVES[name](job):
                    if not same_bits(got, expected):
                        how = "async" if asynchronous else "blocking"
                        wrong.append(f"{name} {dtype}[{count}] {how} {case}: differs")
    return wrong


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_size(rank_pool: Pool, world: int, name: str) -> None:
    assert rank_pool(world).run(check, name, DTYPES, COUNTS) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_large(rank_pool: Pool, world: int, name: str) -> None:
    assert rank_pool(world).run(check, name, ("float32",), (LARGE,)) == [[]] * world


# ---- many at once -------------------------------------------------------------------------------


def queue_many(rank: int, world: int) -> list[str]:
    """Asynchronous operations of all kinds, waited for in another order than issued."""
    group = kept_group()
    jobs: list[tuple[str, Work | None, Array, Array]] = []
    for turn in range(30):
        count = 20_000 if turn % 5 == 0 else turn
        mine = np.full(count, rank + turn, np.int64)
        total = np.full(count, sum(r + turn for r in range(world)), np.int64)
        jobs.append((f"sum {turn}", group.all_reduce(mine, async_op=True), mine, total))
        output = np.zeros(world, np.int32)
        work = group.all_gather(output, np.array([rank * turn], np.int32), async_op=True)
        jobs.append((f"gather {turn}", work, output, np.arange(world, dtype=np.int32) * turn))
        jobs.append((f"barrier {turn}", group.barrier(async_op=True), output, output))
        blocking = np.full(3, rank, np.float64)
        group.broadcast(blocking, turn % world)  # behind all of them
        jobs.append((f"broadcast {turn}", None, blocking, np.full(3, turn % world, np.float64)))
    wrong = []
    for case, work, got, expected in reversed(jobs):
        if work is not None:
            work.wait()
            assert work.is_completed() and work.exception() is None and work.source_rank == -1
        if not same_bits(got, expected):
            wrong.append(case)
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_operations_run_in_the_order_issued(rank_pool: Pool, world: int) -> None:
    assert rank_pool(world).run(queue_many) == [[]] * world


def forget_handles(rank: int, world: int) -> bool:
    """Buffers and handles that nobody holds: the group keeps the memory until it is done."""
    group = kept_group()
    for _ in range(50):
        group.all_reduce(np.ones(30_000), async_op=True)
        group.broadcast(bytearray(100_000), 0, async_op=True)
    last = np.ones(7)
    group.all_reduce(last)
    return bool((last == world).all())


def test_dropped_handles_and_buffers(rank_pool: Pool) -> None:
    assert rank_pool(3).run(forget_handles) == [True] * 3


# ---- beyond 2^31 elements -----------------------------------------------------------------------


def reduce_huge(rank: int, world: int) -> tuple[bool, str]:
    group = Group.from_env(timeout_s=100)
    data = np.full(HUGE, rank + 1, np.int8)
    marks = [0, 2**31 - 1, 2**31, HUGE - 1]
    data[marks] = np.arange(4, dtype=np.int8) * (rank + 1)
    group.all_reduce(data)
    right = data[marks].tolist() == [0, 3, 6, 9]
    data[marks] = 3
    words = data[: HUGE // 8 * 8].view(np.uint64)  # compared eight at a time
    right = right and bool((words == 0x0303030303030303).all()) and set(data[-3:]) == {3}
    data[marks] = rank
    group.broadcast(data, 1)
    right = right and data[marks].tolist() == [1] * 4
    path = group.last_path
    group.close()
    return right, path


@pytest.mark.long  # to touch so much memory takes a busy virtual machine half a minute
@pytest.mark.skipif(
    psutil.virtual_memory().available < 12 * GIB, reason="needs 12 GiB of free memory"
)
def test_beyond_two_to_the_31_elements() -> None:
    assert run_ranks(2, reduce_huge) == [(True, "staged")] * 2
