"""Which path an operation takes, that it says so, and that the path never shows in the result."""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
import time
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import Group, SdpError, SharedMemoryError, _native
from tests.core.kept_group import kept_group, settings
from tests.core.values import Array, as_input, reduced, same_bits, values
from tests.ranks import Pool

COUNT = 100_003
NAME = "sdp-test-memory"


class Shared:
    """Memory of this process that can be registered, with room before and after an array."""

    def __init__(self, count: int = COUNT, pad: int = 0) -> None:
        self.nbytes = 4 * (count + pad)
        self.fd = os.memfd_create(NAME)
        os.ftruncate(self.fd, self.nbytes)
        self.mapping = mmap.mmap(self.fd, self.nbytes)
        self.array = np.frombuffer(self.mapping, np.float32)[pad:]
        self.address = np.frombuffer(self.mapping, np.uint8).ctypes.data

    def register(self, group: Group) -> int:
        return group.register(self.address, self.nbytes, self.fd)

    def close(self) -> None:
        os.close(self.fd)


def check_sum(group: Group, data: Array, path: str) -> None:
    """All-reduce in the data's memory; right, and by this path."""
    world = group.world_size
    inputs = [values("float32", len(data), r) for r in range(world)]
    data[:] = inputs[group.rank]
    group.all_reduce(data)
    assert group.last_path == path, f"{group.last_path}, not {path}"
    assert same_bits(data, reduced(inputs, "float32", "sum"))


# ---- what is said -------------------------------------------------------------------------------

EXPLAINED = {
    ("all_reduce", 4096, True): "inline: small enough to travel with the announcement",
    ("all_reduce", 2**20, True): "zero-copy: every rank's buffer lies in registered memory",
    ("all_reduce", 2**20, False): (
        "staged: large, and not every rank's buffer lies in registered memory"
    ),
}


def explain(rank: int, world: int) -> list[str]:
    group = kept_group()
    texts = [group.explain(op, n, registered=r) for op, n, r in EXPLAINED]
    with pytest.raises(ValueError, match="no operation 'median'; there are all_reduce"):
        group.explain("median", 1)
    return texts


def test_explain(rank_pool: Pool) -> None:
    assert rank_pool(2).run(explain) == [list(EXPLAINED.values())] * 2


def say_last(rank: int, world: int) -> list[str]:
    group = kept_group()
    seen = []
    small, large = np.ones(10), np.ones(COUNT)
    for call in (
        lambda: group.all_reduce(small),
        lambda: group.all_reduce(large),
        lambda: group.broadcast(small, 0),
        lambda: group.broadcast(large, 0),
        lambda: group.all_reduce(large, async_op=True).wait(),  # type: ignore[union-attr]
        group.barrier,
    ):
        call()
        seen.append(group.last_path)
    return seen


def test_last_path(rank_pool: Pool) -> None:
    expected = ["inline", "staged", "inline", "staged", "staged", "inline"]
    assert rank_pool(2).run(say_last) == [expected] * 2


# ---- the same bits ------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "smallest staging": {"SDP_STAGING_BYTES": "65536"},
    "odd staging": {"SDP_STAGING_BYTES": "1000000"},
    "large staging": {"SDP_STAGING_BYTES": str(2**26)},
    "no spinning": {"SDP_SPIN_US": "0"},
    "long spinning": {"SDP_SPIN_US": "2000"},
}


def digest_all(rank: int, world: int, variables: dict[str, str]) -> list[str]:
    """Results of every path and some collectives, with ranks that arrive in changing orders."""
    random = np.random.default_rng(rank)
    with settings(**variables):
        group = Group.from_env(timeout_s=30)
    digests = []
    place = np.frombuffer(group.allocate(4 * COUNT), np.float32)
    for dtype in ("float32", "bfloat16"):
        for count in (1000, COUNT):
            mine = values(dtype, count, rank)
            buffers = [mine.copy(), place.view(mine.dtype)[:count]]
            for data in buffers:
                data[:] = mine
                time.sleep(random.random() * 0.005)
                group.all_reduce(as_input(data, dtype), "avg")
                digests.append(hashlib.sha256(data.tobytes()).hexdigest())
    whole = values("float32", COUNT * world, rank)
    part = np.zeros(COUNT, np.float32)
    group.reduce_scatter(part, whole)
    group.all_gather(whole, part)
    digests.append(hashlib.sha256(whole.tobytes()).hexdigest())
    group.close()
    return digests


@pytest.mark.parametrize("world", [2, 3, 4])
def test_settings_do_not_change_a_bit(rank_pool: Pool, world: int) -> None:
    found = {name: rank_pool(world).run(digest_all, SETTINGS[name]) for name in SETTINGS}
    first = found["default"][0]
    assert first[0] == first[1] and first[2] == first[3], "private and registered differ"
    for name, digests in found.items():
        assert digests == [first] * world, name


def stage_differently(rank: int, world: int) -> str:
    with settings(SDP_STAGING_BYTES=str(2**20 * (1 + rank))):
        try:
            Group.from_env(timeout_s=30)
        except SdpError as error:
            return str(error)
    return "made"


def test_staging_must_be_equal(rank_pool: Pool) -> None:
    first, second = rank_pool(2).run(stage_differently)
    hint = "Hint: use the same version of sdp_plugins and the same SDP_STAGING_BYTES on all ranks."
    assert first == f"[rank 0/2] rendezvous: rank 1 has another memory layout. {hint}"
    assert second == f"[rank 1/2] rendezvous: rank 0 has another memory layout. {hint}"


# ---- registered memory --------------------------------------------------------------------------


def register_on(rank: int, world: int, who: list[int]) -> None:
    """In place only if all ranks' buffers are registered."""
    group = kept_group()
    memory = Shared()
    region = memory.register(group) if rank in who else 0
    check_sum(group, memory.array, "zero-copy" if len(who) == world else "staged")
    if region:
        group.unregister(region)
    memory.close()


@pytest.mark.parametrize("who", [[], [0], [1, 2], [0, 1, 2]], ids=str)
def test_all_ranks_must_have_registered(rank_pool: Pool, who: list[int]) -> None:
    rank_pool(3).run(register_on, who)


def use_parts(rank: int, world: int) -> None:
    """Any part of a region, elsewhere in it on each rank; nothing beyond its ends."""
    group = kept_group()
    pad = 17 * rank  # each rank's array starts at another offset
    memory = Shared(4 * COUNT, pad)
    region = memory.register(group)
    for begin in (0, 1, COUNT):
        check_sum(group, memory.array[begin : begin + COUNT], "zero-copy")
    half = memory.nbytes // 2
    other = np.frombuffer(memory.mapping, np.float32)
    group.unregister(region)
    first = group.register(memory.address, half // 4096 * 4096, memory.fd)
    check_sum(group, other[:COUNT], "zero-copy")
    edge = half // 4096 * 1024 - COUNT // 2  # half of it in the region
    check_sum(group, other[edge : edge + COUNT], "staged")
    second = group.register(  # the rest of the same file
        memory.address + half // 4096 * 4096,
        memory.nbytes - half // 4096 * 4096,
        memory.fd,
        half // 4096 * 4096,
    )
    check_sum(group, other[-COUNT:], "zero-copy")
    assert region < first < second
    group.unregister(first)
    group.unregister(second)
    memory.close()


def test_parts_of_regions(rank_pool: Pool) -> None:
    rank_pool(3).run(use_parts)


def reuse_address(rank: int, world: int) -> None:
    """Memory that is freed and comes back at the same address, as other memory."""
    group = kept_group()
    memory = Shared()
    ids = []
    for turn in range(20):
        region = memory.register(group)
        ids.append(region)
        if turn % 3 > 0:
            check_sum(group, memory.array, "zero-copy")
        group.unregister(region)
        if turn % 2:
            check_sum(group, memory.array, "staged")
        # Other pages at the address: a stale mapping on a peer would give what lay there before.
        fd = os.memfd_create(NAME)
        os.ftruncate(fd, memory.nbytes)
        replace_pages(memory, fd)
        os.close(memory.fd)
        memory.fd = fd
        assert not memory.array.any()
    assert len(set(ids)) == len(ids)
    memory.close()


def replace_pages(memory: Shared, fd: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed_shared = 0x10 | 0x01
    address = libc.mmap(memory.address, memory.nbytes, 3, fixed_shared, fd, 0)
    assert address == memory.address, os.strerror(ctypes.get_errno())


def test_an_address_that_comes_back(rank_pool: Pool) -> None:
    rank_pool(3).run(reuse_address)


def mapped_here() -> int:
    with open("/proc/self/maps") as maps:
        return sum(NAME in line for line in maps)


def register_many(rank: int, world: int) -> tuple[int, int, int]:
    """(mappings before, with 50 regions in use, after they are gone); more than a socket holds."""
    group = kept_group()
    group.all_reduce(np.zeros(COUNT))  # the peers hear of what earlier cases unregistered
    group.all_reduce(np.zeros(COUNT))
    before = mapped_here()
    memories = [Shared(10_000) for _ in range(50)]
    # Nobody listens meanwhile: what does not fit into the sockets must wait, not block or be lost.
    for _ in range(20):
        regions = [memory.register(group) for memory in memories]
        for region in regions:
            group.unregister(region)
    regions = [memory.register(group) for memory in memories]
    group.barrier()
    for turn in range(100):
        memories[turn % 50].array[:] = rank
        group.all_reduce(memories[turn % 50].array)
        if group.last_path == "zero-copy" and turn >= 50:
            assert (memories[turn % 50].array == sum(range(world))).all()
    assert group.last_path == "zero-copy"
    for memory in memories:
        memory.array[:] = rank
        group.all_reduce(memory.array)
        assert group.last_path == "zero-copy"
        assert (memory.array == sum(range(world))).all()
    during = mapped_here()
    for region in regions:
        group.unregister(region)
    for memory in memories:
        memory.close()
    del memories, memory
    for _ in range(5):
        group.all_reduce(np.zeros(COUNT))
    return before, during, mapped_here()


def test_many_regions(rank_pool: Pool) -> None:
    for before, during, after in rank_pool(2).run(register_many):
        assert during - before == 100  # ours and the peer's
        assert after == before


def register_badly(rank: int, world: int) -> list[str]:
    """Wrong calls leave the group as it was."""
    group = kept_group()
    memory = Shared()
    texts = []
    for nbytes, fd, offset in (
        (0, memory.fd, 0),
        (memory.nbytes + 4096, memory.fd, 0),
        (memory.nbytes, memory.fd, 4096),
        (memory.nbytes, 999, 0),
    ):
        with pytest.raises((ValueError, SdpError)) as caught:
            group.register(memory.address, nbytes, fd, offset)
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
    group.unregister(12345)  # nobody's
    check_sum(group, memory.array, "staged")
    memory.close()
    return texts


def test_wrong_registrations(rank_pool: Pool) -> None:
    for rank, texts in enumerate(rank_pool(2).run(register_badly)):
        empty, long, beyond, closed = texts
        assert empty == "ValueError: registered memory must not be empty"
        size = Shared.__init__.__defaults__[0] * 4  # type: ignore[index]
        head = f"SharedMemoryError: [rank {rank}/2] register: "
        text = head + "a shared memory file holds {} bytes, but {} at offset {} were announced"
        assert long == text.format(size, size + 4096, 0)
        assert beyond == text.format(size, size, 4096)
        assert closed == head + "cannot share a memory file: Bad file descriptor"


def allocate(rank: int, world: int) -> tuple[Any, ...]:
    group = kept_group()
    view = group.allocate(1000)
    found = (view.format, view.nbytes, view.readonly, view.contiguous, any(view))
    with pytest.raises(ValueError):
        group.allocate(0)
    head = rf"^\[rank {rank}/2\] allocate: cannot map {2**62} bytes of shared memory"
    with pytest.raises(SdpError, match=head + r".*vm\.max_map_count\.$"):
        group.allocate(2**62)
    group.barrier()
    return found


def test_allocate(rank_pool: Pool) -> None:
    assert rank_pool(2).run(allocate) == [("B", 1000, False, True, False)] * 2


def exceed_the_size_of_files(rank: int, world: int) -> list[str]:
    group, file = kept_group(), os.memfd_create(NAME)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(SharedMemoryError) as allocating:
            group.allocate(2**21)
        with pytest.raises(SharedMemoryError) as connecting:
            _native.initialize_segment(file, 0, 2, 2**21, f"[rank {rank}/2] ")
    finally:  # the process serves other tests
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.close(file)
    group.barrier()
    return [str(allocating.value), str(connecting.value)]


def test_a_limit_on_shared_memory_is_named(rank_pool: Pool) -> None:
    for rank, (allocating, connecting) in enumerate(rank_pool(2).run(exceed_the_size_of_files)):
        head = f"[rank {rank}/2] allocate: cannot allocate 2097152 bytes of shared memory: "
        assert allocating.startswith(head) and "(ulimit -f)" in allocating
        head = f"[rank {rank}/2] rendezvous: cannot size a memory file to "
        assert connecting.startswith(head)
        assert "(ulimit -f)" in connecting
