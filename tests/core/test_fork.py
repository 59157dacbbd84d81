"""fork() at any moment: the child cannot use the group, and cannot disturb it."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import FusionBuffer, Group, PeerLostError, SdpError
from sdp_plugins.core.dtypes import DType
from tests.core.failing import NOTICE_S, assert_failed, now
from tests.ranks import Pool, say, start_ranks

CHILD_S = 100.0
FORKED = "this process was forked from the one that owns the group"


def exit_code(pid: int) -> int | str:
    """How a child ended; a child that hangs is killed."""
    end = now() + CHILD_S
    while now() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def in_child(body: Callable[[], object]) -> int | str:
    """Run in a forked child that ends as a script does, with all of the interpreter's clean-up."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return exit_code(pid)
    try:
        body()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.exit(0)


class Held:
    """A group with everything that can hang on one."""

    def __init__(self) -> None:
        self.group = Group.from_env(timeout_s=30)
        self.world = self.group.world_size
        self.peer = (self.group.rank + 1) % self.world
        self.memory = np.frombuffer(self.group.allocate(2**20), np.float32)
        self.fusion = FusionBuffer(self.group, [(50_000, DType.float32)])
        self.fd = os.memfd_create("test")
        os.ftruncate(self.fd, 2**20)
        self.mapping = mmap.mmap(self.fd, 2**20)
        self.registered = np.frombuffer(self.mapping, np.float32)
        self.region = self.group.register(self.registered.ctypes.data, 2**20, self.fd)
        self.pending: list[Any] = []

    def start(self) -> None:
        """Operations that wait for the others, in the engine's thread and in send/recv's."""
        self.pending = [
            self.group.all_reduce(self.memory, async_op=True),
            self.group.recv(np.zeros(3), self.peer, async_op=True),
        ]

    def finish(self) -> None:
        self.group.send(np.ones(3), (self.group.rank - 1) % self.world)
        for work in self.pending:
            work.wait()

    def check(self) -> None:
        """All of it still works."""
        for data in (self.memory, self.registered):
            data[:] = self.group.rank
            self.group.all_reduce(data)
            assert self.group.last_path == "zero-copy"
            assert (data == sum(range(self.world))).all()
        gradient = np.full(50_000, self.group.rank, np.float32)
        self.fusion.ready(0, gradient)
        self.fusion.finish()
        assert (gradient == sum(range(self.world)) / self.world).all()

    def use(self) -> None:
        """In the child: everything is refused at once."""
        for call in (
            self.group.barrier,
            lambda: self.group.all_reduce(np.zeros(3)),
            lambda: self.group.all_reduce(self.memory, async_op=True),
            lambda: self.group.send(np.zeros(3), self.peer),
            lambda: self.group.recv(np.zeros(3), self.peer),
            lambda: self.group.allocate(100),
            lambda: self.group.new_group([0]),
            lambda: self.group.register(self.registered.ctypes.data, 4096, self.fd),
            lambda: self.fusion.ready(0, np.zeros(50_000, np.float32)),
            self.fusion.finish,
            *(work.wait for work in self.pending),
        ):
            with pytest.raises(SdpError, match=FORKED):
                call()
        assert FORKED in str(self.group.failure)

    def meddle(self) -> None:
        """In the child: what a clean-up may do, on purpose or by a finalizer."""
        self.group.unregister(self.region)
        self.group.abort("the child's own business")
        self.group.close()
        assert self.group.closed

    def drop(self) -> None:
        del self.group, self.memory, self.fusion, self.pending
        gc.collect()


BODIES = {
    "exits": lambda held: None,
    "uses it": lambda held: held.use(),
    "closes it": lambda held: held.meddle(),
    "drops it": lambda held: held.drop(),
}


def fork_while_idle(rank: int, world: int, what: str) -> int | str:
    held = Held()
    held.check()
    code = in_child(lambda: BODIES[what](held))
    held.check()
    held.group.close()
    return code


@pytest.mark.parametrize("what", BODIES)
def test_fork_while_idle(what: str) -> None:
    with start_ranks(2, fork_while_idle, what) as ranks:
        assert ranks.results() == [0, 0]
        ranks.finish()


def fork_while_waiting(rank: int, world: int, what: str) -> int | str:
    held = Held()
    held.check()
    code: int | str = 0
    if rank == 0:
        held.start()
        time.sleep(0.2)  # the threads sleep in their waits
        code = in_child(lambda: BODIES[what](held))
        held.group.send(np.zeros(1), 1, tag=9)
    else:
        held.group.recv(np.zeros(1), 0, tag=9)
        held.start()
    held.finish()
    held.check()
    held.group.close()
    return code


@pytest.mark.parametrize("what", BODIES)
def test_fork_while_operations_wait(what: str) -> None:
    with start_ranks(2, fork_while_waiting, what) as ranks:
        assert ranks.results() == [0, 0]
        ranks.finish()


def fork_in_traffic(rank: int, world: int) -> list[int | str]:
    """Many children, as data loaders start them, while the engine is busy."""
    group = Group.from_env(timeout_s=30)
    data = [np.full(200_000, rank, np.float32) for _ in range(4)]
    codes = []
    context = multiprocessing.get_context("fork")
    for turn in range(8):
        works = [group.all_reduce(x, "max", async_op=True) for x in data]
        worker = context.Process(target=time.sleep, args=(0.01,))
        worker.start()
        codes.append(in_child(lambda: None))
        group.all_reduce(np.zeros(3))
        for work in works:
            assert work is not None
            work.wait()
        worker.join()
        codes.append(worker.exitcode)
        assert all((x == world - 1).all() for x in data), turn
    group.close()
    return codes


def test_fork_in_the_middle_of_traffic() -> None:
    with start_ranks(2, fork_in_traffic) as ranks:
        assert ranks.results() == [[0] * 16] * 2
        ranks.finish()


def die_and_leave_child(rank: int, world: int) -> None:
    group = Group.from_env(timeout_s=30)
    group.barrier()
    if rank == 1:
        child = os.fork()  # it holds copies of all descriptors
        if child == 0:
            time.sleep(600)
        say(child)
        time.sleep(600)
    group.all_reduce(np.zeros(10))


def test_killed_rank_whose_child_lives_on() -> None:
    with start_ranks(3, die_and_leave_child) as ranks:
        child = ranks[1].heard()
        time.sleep(0.2)
        killed = now()
        ranks[1].kill()
        outcomes = [ranks[0].outcome(), ranks[2].outcome()]
        os.kill(child, 0)  # still there
        assert_failed(
            outcomes,
            PeerLostError,
            ranks=(1,),
            op="all_reduce",
            text=".*: rank 1 ended unexpectedly",
            since=killed,
            within_s=NOTICE_S,
        )


def regroup_in_child(rank: int, world: int) -> list[float]:
    """A child that was forked before there was a group can be a rank itself."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        with Group.from_env(timeout_s=30) as group:
            data = np.full(5, rank + 1.0)
            group.all_reduce(data)
            os.write(sending, data.tobytes())
        os._exit(0)
    assert exit_code(pid) == 0
    data = np.frombuffer(os.read(receiving, 100))
    os.close(receiving)
    os.close(sending)
    return data.tolist()


def test_forked_ranks(rank_pool: Pool) -> None:
    assert rank_pool(2).run(regroup_in_child) == [[3.0] * 5] * 2
