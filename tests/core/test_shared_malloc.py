"""Large blocks of the C library's allocator lie in memory that peers map, and stay right."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import Group, PeerLostError
from sdp_plugins.core.config import MIB
from sdp_plugins.core.shared_malloc import opened, share_large_blocks
from sdp_plugins.launch.job_environment import PRELOAD, shared_malloc
from tests.core.failing import NOTICE_S, assert_failed, now
from tests.core.test_fork import in_child
from tests.core.values import reduced, same_bits, values
from tests.log_lines import logged
from tests.ranks import HANG_S, RankPool, say, start_ranks

COUNT = MIB  # elements of 4 bytes
LIBC = ctypes.CDLL(None)
for name, arguments in {
    "aligned_alloc": [ctypes.c_size_t] * 2,
    "memalign": [ctypes.c_size_t] * 2,
    "malloc": [ctypes.c_size_t],
    "realloc": [ctypes.c_void_p, ctypes.c_size_t],
}.items():
    getattr(LIBC, name).argtypes, getattr(LIBC, name).restype = arguments, ctypes.c_void_p
LIBC.free.argtypes, LIBC.free.restype = [ctypes.c_void_p], None
LIBC.malloc_usable_size.argtypes = [ctypes.c_void_p]
LIBC.malloc_usable_size.restype = ctypes.c_size_t


def environment() -> dict[str, str]:
    found = shared_malloc({})
    assert found, "the library is not installed"
    return found


@pytest.fixture
def ranks(rank_pools: Any) -> RankPool:
    """Two kept ranks that have loaded the library."""
    pool: RankPool = rank_pools.pool(2, env=environment())
    return pool


def posix_memalign(alignment: int, nbytes: int) -> int:
    block = ctypes.c_void_p()
    error = LIBC.posix_memalign(
        ctypes.byref(block), ctypes.c_size_t(alignment), ctypes.c_size_t(nbytes)
    )
    if error:
        raise OSError(error, os.strerror(error))
    return block.value or 0


def shared() -> tuple[int, int]:
    """First address of this process's file, and the one behind its last."""
    data, nbytes, _ = opened(0)
    return data, data + nbytes


def is_shared(address: int) -> bool:
    first, last = shared()
    return first <= address < last


def array_at(address: int, count: int = COUNT) -> np.ndarray[Any, Any]:
    return np.frombuffer((ctypes.c_char * (4 * count)).from_address(address), np.float32)


@contextmanager
def block() -> Iterator[np.ndarray[Any, Any]]:
    """An array in an aligned block."""
    address = posix_memalign(64, 4 * COUNT)
    yield array_at(address)
    LIBC.free(address)


def caller() -> ModuleType:
    """In the place of a framework: the library from which ctypes calls."""
    found = ModuleType("libffi")
    maps = Path("/proc/self/maps").read_text()
    libffi = re.search(r"/\S+/libffi\S*", maps) or re.search(r"/\S+/_ctypes\.\S*", maps)
    assert libffi
    found.__file__ = libffi[0]
    return found


@contextmanager
def sharing(timeout_s: float = 100) -> Iterator[Group]:
    with Group.from_env(timeout_s=timeout_s) as group:
        assert share_large_blocks(group, caller())
        yield group


# ---- where blocks lie ----------------------------------------------------------------------------


def allocate(rank: int, world: int) -> None:
    before = posix_memalign(64, 4 * MIB)
    with sharing():
        allocators = {
            "posix_memalign": posix_memalign,
            "aligned_alloc": LIBC.aligned_alloc,
            "memalign": LIBC.memalign,
        }
        for allocator, alignment in itertools.product(allocators, (16, 64, 4096, 2 * MIB)):
            address = allocators[allocator](alignment, 3 * MIB)
            assert is_shared(address), (allocator, alignment)
            assert address % alignment == 0
            assert LIBC.malloc_usable_size(address) >= 3 * MIB
            ctypes.memset(address, 1, 3 * MIB)
            LIBC.free(address)
        small, plain, huge = (
            posix_memalign(64, MIB - 1),
            LIBC.malloc(4 * MIB),
            posix_memalign(4 * MIB, 4 * MIB),
        )
        for address in (before, small, plain, huge):
            assert not is_shared(address)
            LIBC.free(address)
        with pytest.raises(OSError, match="Invalid argument"):
            posix_memalign(24, 4 * MIB)
    with block() as data:  # the file outlives the group
        assert is_shared(data.ctypes.data)


def test_aligned_blocks_from_one_mebibyte_lie_in_the_file(ranks: RankPool) -> None:
    ranks.run(allocate)


def resize(rank: int, world: int) -> None:
    with sharing():
        for nbytes in (MIB // 2, 4 * MIB):
            address = posix_memalign(64, 2 * MIB)
            array_at(address, MIB // 2)[:] = np.arange(MIB // 2)
            moved = LIBC.realloc(address, nbytes)
            assert not is_shared(moved)
            kept = min(nbytes, 2 * MIB) // 4
            assert (array_at(moved, kept) == np.arange(kept)).all()
            LIBC.free(moved)
            assert posix_memalign(64, 2 * MIB) == address  # it had been freed
            assert LIBC.realloc(address, 0) is None


def test_realloc_moves_a_block_out_of_the_file(ranks: RankPool) -> None:
    ranks.run(resize)


def free_twice(rank: int, world: int) -> None:
    with sharing():
        address = posix_memalign(64, MIB)
    LIBC.free(address)
    assert in_child(lambda: LIBC.free(address)) == -signal.SIGABRT


def test_a_block_that_is_freed_twice_ends_the_program(ranks: RankPool) -> None:
    ranks.run(free_twice)


def ask_for_another(rank: int, world: int) -> None:
    nobody = ModuleType("nobody")
    nobody.__file__ = "/nowhere/nobody.py"
    with Group.from_env(timeout_s=100) as group:
        assert share_large_blocks(group, nobody)
        with block() as data:
            assert not is_shared(data.ctypes.data)
        assert share_large_blocks(group, caller())
        with block() as data:
            assert is_shared(data.ctypes.data)


def test_only_the_frameworks_blocks_lie_in_the_file() -> None:
    with start_ranks(2, ask_for_another, env=environment()) as ranks:
        ranks.results()


def fill(rank: int, world: int) -> None:
    with sharing():
        first, last = shared()
        whole = posix_memalign(64, last - first)
        assert whole == first  # nothing was left there by other cases, in several blocks
        with block() as data:
            assert not is_shared(data.ctypes.data)
            data[:] = 1
        LIBC.free(whole)
        with block() as data:
            assert data.ctypes.data == first
        with pytest.raises(OSError, match="Cannot allocate memory"):
            posix_memalign(64, 2**62)


def test_what_does_not_fit_comes_from_the_c_library(ranks: RankPool) -> None:
    ranks.run(fill)


def churn(rank: int, world: int) -> None:
    """Threads allocate and write blocks, and free those of other threads."""
    with sharing():
        wrong, left = [], [posix_memalign(64, MIB)]

        def work(number: int) -> None:
            random = np.random.default_rng(number)
            for turn in range(200):
                count = int(random.integers(MIB // 4, MIB))
                address = posix_memalign(64, 4 * count)
                marks = array_at(address, count)[:: count // 7]
                marks[:] = mark = number * 1000 + turn
                LIBC.sched_yield()
                if not is_shared(address) or (marks != mark).any():
                    wrong.append((number, turn))
                left.append(address)
                LIBC.free(left.pop(0))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        LIBC.free(left.pop())
        assert not left


def test_threads(ranks: RankPool) -> None:
    ranks.run(churn)


# ---- operations on them --------------------------------------------------------------------------


def reduce_in_place(rank: int, world: int) -> None:
    inputs = [values("float32", COUNT, r) for r in range(world)]
    expected = reduced(inputs, "float32", "sum")
    with sharing() as first, Group.from_env(timeout_s=100) as second:
        assert share_large_blocks(second, caller())
        for group in (first, second):
            with block() as before, block() as data:  # at another place in the file
                before[:] = 1
                data[:] = inputs[rank]
                group.all_reduce(data)
                assert group.last_path == "zero-copy"
                assert same_bits(data, expected)
                assert (before == 1).all()
    if rank == 0:
        gap = posix_memalign(64, MIB)  # places differ from here on
    with sharing() as group, block() as data:
        data[:] = inputs[rank]
        group.all_reduce(data)
        assert group.last_path == "zero-copy"
        assert same_bits(data, expected)
    if rank == 0:
        LIBC.free(gap)


def test_operations_copy_nothing(ranks: RankPool) -> None:
    ranks.run(reduce_in_place)


def differ(rank: int, world: int) -> None:
    os.environ["SDP_REGISTER"] = str(rank)
    with Group.from_env(timeout_s=100) as group:
        assert not share_large_blocks(group, caller())
    del os.environ["SDP_REGISTER"]


def test_all_ranks_agree(ranks: RankPool) -> None:
    ranks.run(differ)


def reduce_without_end(rank: int, world: int) -> None:
    with sharing(NOTICE_S) as group, block() as data:
        data[:] = 0
        for turn in itertools.count():
            group.all_reduce(data)
            if turn == 10:
                assert group.last_path == "zero-copy"
                say("going")


def test_a_lost_rank_is_named() -> None:
    with start_ranks(2, reduce_without_end, env=environment()) as ranks:
        for rank in ranks:
            assert rank.heard() == "going"
        since = now()
        os.kill(ranks[1].pid, signal.SIGKILL)
        lost = {"ranks": (1,), "op": "all_reduce", "text": "rank 1", "since": since}
        assert_failed([ranks[0].outcome()], PeerLostError, **lost)


# ---- forked children -----------------------------------------------------------------------------


def fork(rank: int, world: int) -> None:
    with sharing() as group, block() as data:
        data[:] = 7
        first, last = shared()

        def child() -> None:
            assert (data == 7).all()
            data[:] = 8
            with block() as own:
                assert not first <= own.ctypes.data < last
                own[:] = 9
            LIBC.free(posix_memalign(64, MIB))

        assert in_child(child) == 0
        assert (data == 7).all()
        group.all_reduce(data)
        assert group.last_path == "zero-copy"
        assert (data == 14).all()


def test_a_child_writes_into_memory_of_its_own(ranks: RankPool) -> None:
    ranks.run(fork)


def fork_with_handlers(rank: int, world: int) -> None:
    """Handlers of others, installed before the file was opened, allocate and free."""
    handler = ctypes.CFUNCTYPE(None)(lambda: LIBC.free(posix_memalign(64, MIB)))
    LIBC.__register_atfork(handler, handler, handler, None)
    with sharing():
        assert in_child(lambda: None) == 0


def test_other_handlers_of_forks_may_allocate() -> None:
    with start_ranks(2, fork_with_handlers, env=environment()) as ranks:
        ranks.results()


def group_in_child(rank: int, world: int) -> None:
    with sharing():
        pass

    def child() -> None:
        os.environ["SDP_JOB_ID"] += "-children"
        os.environ["MASTER_PORT"] = "0"
        with Group.from_env(timeout_s=100) as group:
            assert not share_large_blocks(group, caller())

    assert in_child(child) == 0


def test_a_group_of_children_copies(ranks: RankPool) -> None:
    ranks.run(group_in_child)


# ---- where it cannot be --------------------------------------------------------------------------


SAYS = "large tensors are copied, as they cannot lie in memory that the ranks share"


def not_shared(rank: int, world: int, says: str, room: float) -> None:
    with logged("sdp_plugins.core") as lines, Group.from_env(timeout_s=100) as group:
        if room:
            usage = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (usage + int(room * memory), -1))
        assert not share_large_blocks(group, caller())
        with block() as data:
            data[:] = rank
            group.all_reduce(data)
            assert group.last_path == "staged"
            assert (data == sum(range(world))).all()
    assert len(lines) == bool(says)
    assert all(says in line for line in lines)


@pytest.mark.parametrize(
    ("variables", "says", "room"),
    [
        ({}, "", 0),
        ({**environment(), "SDP_REGISTER": "0"}, "", 0),
        (environment(), SAYS, 0.1),
        (environment(), SAYS, 0.9),  # its own file is half of the memory
    ],
    ids=["no library", "off", "no address space", "none for the other's"],
)
def test_otherwise_operations_copy(variables: dict[str, str], says: str, room: float) -> None:
    with start_ranks(2, not_shared, says, room, env={PRELOAD: None, **variables}) as ranks:
        ranks.results()


def test_it_can_be_the_first_to_free_the_text_of_an_error(tmp_path: Path) -> None:
    """Looking for the C library's function frees that text, by this function."""
    source, program = tmp_path / "first.c", tmp_path / "first"
    source.write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdlib.h>\n"
        'int main() { dlsym(RTLD_DEFAULT, "none"); free(malloc(10)); return 3; }'
    )
    subprocess.run(["g++", "-fno-builtin", "-xc++", source, "-o", program, "-ldl"], check=True)
    assert subprocess.run([program], env=environment(), timeout=HANG_S).returncode == 3


def test_the_library_needs_no_other() -> None:
    """A C++ library beside that of the program's own could break the program."""
    assert b"libstdc++" not in Path(environment()[PRELOAD]).read_bytes()
