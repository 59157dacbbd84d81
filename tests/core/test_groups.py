"""Groups: their attributes, sub-groups, many at once, several jobs on one host."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import (
    Group,
    PeerLostError,
    RendezvousError,
    SdpError,
)
from sdp_plugins.core import _native as native
from sdp_plugins.core.endpoint import Endpoint
from tests.core.rendezvous_cases import FileStore
from tests.leaks import no_leaks
from tests.ranks import Pool


def total(group: Group, value: float) -> float:
    """A small and a large all_reduce."""
    for count in (3, 100_000):
        data = np.full(count, value)
        group.all_reduce(data)
        assert (data == data[0]).all()
    return float(data[0])


# ---- one group ----------------------------------------------------------------------------------


def describe(rank: int, world: int) -> None:
    group = Group.from_env(name="a name", timeout_s=7.5)
    assert (group.rank, group.world_size, group.name, group.timeout_s) == (
        rank,
        world,
        "a name",
        7.5,
    )
    assert (group.local_rank, group.local_size, group.node_rank) == (rank, world, 0)
    assert group.last_path == "none" and not group.closed and group.failure is None
    with group as same:
        assert same is group
        assert total(group, 1) == world
    assert group.closed
    group.close()
    with pytest.raises(
        SdpError, match=rf"\[rank {rank} in group a name \(ranks 0-{world - 1}\)\] the group"
    ):
        group.all_reduce(np.zeros(3))
    assert "is closed" in str(group.failure)


def test_attributes_and_closing(rank_pool: Pool) -> None:
    rank_pool(3).run(describe)


def exchange(rank: int, world: int) -> None:
    with Group.from_env(timeout_s=5) as group, no_leaks():
        for most in (0, 119, 120, 121, 100_000):  # one step, up to 120 bytes; else two
            blobs = [bytes([65 + r]) * (most if r == 1 else r) for r in range(world)]
            assert group.exchange(blobs[rank]) == blobs
        assert group.exchange(b"\0\0") == [b"\0\0"] * world
        assert group.exchange(bytearray(b"abc")) == [b"abc"] * world
        with pytest.raises(TypeError, match="bytes-like"):
            group.exchange("abc")  # type: ignore[arg-type]


def test_exchanged_bytes(rank_pool: Pool) -> None:
    rank_pool(3).run(exchange)


@pytest.fixture
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own process is a world of one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_job")
def test_a_world_of_one_does_everything() -> None:
    with Group.from_env(timeout_s=5) as group:
        assert (group.rank, group.world_size) == (0, 1)
        data, out = np.arange(5.0), np.zeros(5)
        group.all_reduce(data)
        group.all_reduce(data, "avg")
        group.reduce(data, 0, "max")
        group.broadcast(data, 0)
        group.all_gather(out, data)
        group.reduce_scatter(out, data, "product")
        group.gather([out], data, 0)
        group.scatter(out, [data], 0)
        group.all_to_all(out, data)
        group.barrier()
        assert data.tolist() == out.tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(
            ValueError, match="destination 0 is not another rank of this group of 1"
        ):
            group.send(data, 0)
        child = group.new_group([0])
        assert child is not None and total(child, 4) == 4
        child.close()


@pytest.mark.usefixtures("_no_job")
def test_allocated_memory_can_be_used_after_its_group() -> None:
    group = Group.from_env(timeout_s=5)
    array = np.frombuffer(group.allocate(2**16), np.uint8)
    group.close()
    del group
    gc.collect()
    assert not array.any()
    array[:] = 1
    assert array.sum() == 2**16


def shared_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:sdp-shared")


@pytest.mark.usefixtures("_no_job")
def test_allocated_memory_goes_with_its_last_reference() -> None:
    before = shared_mappings()
    with Group.from_env(timeout_s=5) as group:
        array = np.frombuffer(group.allocate(2**16), np.uint8)
        part = array[100:]
        del array
        assert shared_mappings() == before + 1
        del part
        assert shared_mappings() == before


def give_back(rank: int, world: int) -> None:
    """Whatever runs next, peers let go of memory that was given back."""
    with Group.from_env(timeout_s=30) as group, no_leaks():
        before = shared_mappings()
        for _ in range(20):
            group.allocate(2**20)
            group.barrier()
        group.barrier()
        assert shared_mappings() == before


def test_peers_let_go_of_memory(rank_pool: Pool) -> None:
    rank_pool(2).run(give_back)


def run_beside_a_receive(rank: int, world: int) -> int:
    """What is done is let go of, though something older is not."""
    with Group.from_env(timeout_s=30) as group:
        if rank == 1:
            pending = group.recv(np.zeros(4), 0, async_op=True)
        arrays = []
        for _ in range(100):
            array = np.zeros(1000)
            arrays.append(weakref.ref(array))
            work = group.all_reduce(array, async_op=True)
            assert work is not None
            work.wait()
            del array, work
        if rank == 0:
            group.send(np.zeros(4), 1)
        else:
            pending.wait()
        return sum(array() is not None for array in arrays)


def test_done_operations_hold_nothing(rank_pool: Pool) -> None:
    assert max(rank_pool(2).run(run_beside_a_receive)) <= 2


class _Interrupted:
    """An endpoint; Ctrl-C comes when ``submit`` has started the operation, or refused it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._submit = endpoint.submit

    def submit(self, request: native.Request) -> native.Work:
        with suppress(ValueError):
            self._submit(request)
        raise KeyboardInterrupt


def interrupt_a_submit(rank: int, world: int) -> None:
    with Group.from_env(timeout_s=30) as group:
        array = np.ones(1000)
        if rank == 0:
            issuer = group.issuer
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(issuer, "endpoint", _Interrupted(issuer.endpoint))
                with pytest.raises(KeyboardInterrupt):
                    group.all_reduce(array, async_op=True)
                refused = np.ones(1)
                with pytest.raises(KeyboardInterrupt):
                    group.send(refused, 7, async_op=True)
            held, unused = weakref.ref(array), weakref.ref(refused)
            del array, refused
            gc.collect()
            kept = held()
            assert kept is not None
            group.send(np.zeros(1), 1)
            group.barrier()
            assert kept.sum() == 2000
            del kept
            for _ in range(3):
                group.barrier()
            assert held() is None
            assert unused() is None
        else:
            group.recv(np.zeros(1), 0)
            group.all_reduce(array)
            for _ in range(4):
                group.barrier()


def test_ctrl_c_in_a_submit(rank_pool: Pool) -> None:
    rank_pool(2).run(interrupt_a_submit)


def forget(rank: int, world: int) -> None:
    """Nobody closes the group or waits for its operations, some of which cannot even begin."""
    with no_leaks():
        for turn in range(5):
            group = Group.from_env(timeout_s=30)
            group.barrier()
            with suppress(PeerLostError):  # the other one may be ahead, and have left
                for _ in range(3):
                    group.all_reduce(np.zeros(100_000), async_op=True)
                group.recv(np.zeros(1000), 1 - rank, async_op=True)
                if rank == turn % 2:
                    group.broadcast(np.zeros(100_000), 0, async_op=True)
            if turn > 2:
                group.myself = group  # type: ignore[attr-defined]
            del group
            gc.collect()


def test_forgotten_groups_leave_nothing(rank_pool: Pool) -> None:
    rank_pool(2).run(forget)


def meet_by_store(rank: int, world: int, root: str) -> float:
    with Group.from_store(FileStore(root), rank, world, name="by store", timeout_s=30) as group:
        return total(group, rank)


def test_from_store(rank_pool: Pool, tmp_path: Path) -> None:
    assert rank_pool(3).run(meet_by_store, str(tmp_path)) == [3.0] * 3


# ---- sub-groups ---------------------------------------------------------------------------------


def split(
    rank: int, world: int, members: Sequence[int]
) -> tuple[int, int, float, list[int]] | None:
    """(rank there, size, sum of the members' ranks, who sits where), or None."""
    with Group.from_env(timeout_s=30) as world_group:
        group = world_group.new_group(members)
        assert total(world_group, 1) == world  # goes on beside it
        if group is None:
            return None
        seats = np.zeros(len(members), np.int64)
        group.all_gather(seats, np.array([rank]))
        result = (group.rank, group.world_size, total(group, rank), seats.tolist())
        group.close()
        assert total(world_group, 1) == world if len(members) == world else True
        return result


@pytest.mark.parametrize(
    "members", [[0], [2], [0, 3], [1, 2, 3], [3, 1], [2, 0, 1], [3, 2, 1, 0], [0, 1, 2, 3], []]
)
def test_sub_group(rank_pool: Pool, members: list[int]) -> None:
    expected = [
        (members.index(rank), len(members), float(sum(members)), members)
        if rank in members
        else None
        for rank in range(4)
    ]
    assert rank_pool(4).run(split, members) == expected


def nest(rank: int, world: int) -> list[Any]:
    """Groups of groups; the parents are closed meanwhile."""
    outer = Group.from_env(timeout_s=30)
    middle = outer.new_group([3, 2, 1])
    outer.close()
    if middle is None:
        return [None]
    inner = middle.new_group([0, 2], name="inner")  # ranks 3 and 1 of the world
    middle.close()
    if inner is None:
        return [middle.name, None]
    with inner:
        return [middle.name, inner.name, inner.rank, inner.timeout_s, total(inner, rank)]


def test_nested_groups(rank_pool: Pool) -> None:
    assert rank_pool(4).run(nest) == [
        [None],
        ["default/3,2,1", "inner", 1, 30, 4.0],
        ["default/3,2,1", None],
        ["default/3,2,1", "inner", 0, 30, 4.0],
    ]


def name_badly(rank: int, world: int) -> list[str]:
    texts = []
    with Group.from_env(timeout_s=30) as group:
        for members in ([0, 0], [0, 2], [-1, 0]):
            with pytest.raises(ValueError) as caught:
                group.new_group(members)
            texts.append(str(caught.value))
        group.barrier()
    return texts


def test_members_must_be_ranks(rank_pool: Pool) -> None:
    texts = [
        f"new_group: {members} are not distinct ranks of a group of 2"
        for members in ([0, 0], [0, 2], [-1, 0])
    ]
    assert rank_pool(2).run(name_badly) == [texts, texts]


def disagree(rank: int, world: int, views: list[list[int]]) -> str:
    with Group.from_env(timeout_s=5) as group:
        try:
            child = group.new_group(views[rank])
        except RendezvousError as error:
            group.barrier()  # the parent is as good as before
            return str(error)
        group.barrier()
        return "none" if child is None else "made"


@pytest.mark.parametrize(
    ("views", "fail"),
    [
        ([[0, 1], [1, 0], [0, 1]], [True, True, False]),
        ([[0, 1, 2], [0, 1, 2], [0, 1]], [True, True, False]),
    ],
)
def test_disagreement_about_members(rank_pool: Pool, views: Any, fail: list[bool]) -> None:
    texts = rank_pool(3).run(disagree, views)
    assert [text.startswith(f"[rank {r}/") for r, text in enumerate(texts)] == fail or [
        "rendezvous" in text for text in texts
    ] == fail
    assert [text == "none" for text in texts] == [not failed for failed in fail]
