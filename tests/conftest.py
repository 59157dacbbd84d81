"""Fixtures of every test: nothing may be left behind, and pools of ranks for many cases."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import resource_tracker

import pytest

from tests import leaks
from tests.forked import adopt_orphans, close_servers, server_fds, server_pids
from tests.leaks import KINDS, Snapshot, descriptors, own_shared_memory, reap_orphans, remaining
from tests.ranks import RankPool, Start


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, adopt orphans, so that they are seen, and mount our own /dev/shm."""
    config.addinivalue_line(
        "markers",
        "may_leak(*kinds, reason): kinds of leaks (processes, threads, fds, shm, env) that this "
        "test cannot avoid, and why",
    )
    config.addinivalue_line(
        "markers", "versions: run with other versions of frameworks, too (make test-keras-versions)"
    )
    config.addinivalue_line(
        "markers", "long: takes minutes, and shows rarely more (make test-long)"
    )
    for number in (signal.SIGINT, signal.SIGHUP):
        # A shell's background commands and nohup ignore these. Processes that a test starts would
        # too, unless this one handles them.
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    # NumPy's threads spin as they start, for as long as all of its import takes; tests start
    # hundreds of processes that import it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    resource_tracker.ensure_running()  # lasts for the session once multiprocessing has used it
    adopt_orphans()
    own_shared_memory()


MOST_POOLS = 4  # of a session: ranks of Keras grow to 1 GB each, and five sessions run at once


class Pools(dict[object, RankPool]):
    """Pools of ranks, each started when it is needed; the least recently used ones end."""

    def pool(
        self,
        n: int,
        kind: str = "",
        env: Mapping[str, str] | None = None,
        module: str | None = None,
    ) -> RankPool:
        """n ranks for tests of a kind that must not share them with others.

        In an environment, if there is one; and then with a module that is imported once for all.
        """
        key = (n, kind, frozenset((env or {}).items()), module)
        self[key] = self.pop(key, None) or RankPool(n, env, module)
        for old in list(self)[:-MOST_POOLS]:
            self.pop(old).close()
        return self[key]


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Pools]:
    """The session's pools."""
    pools = Pools()
    yield pools
    close_servers()
    with ExitStack() as stack:  # closes all, even if one fails
        for pool in pools.values():
            stack.callback(pool.close)


@pytest.fixture
def rank_pool(rank_pools: Pools) -> Callable[[int], RankPool]:
    """`rank_pool(n)`: n ranks in kept processes; `.run(function, *args)` runs a case on them."""
    return rank_pools.pool


@pytest.fixture
def start_pooled(rank_pools: Pools) -> Start:
    """`with start_pooled(n, function, *args) as ranks`: as start_ranks, but in kept processes."""
    return lambda n, function, *args: rank_pools.pool(n, "to lose some of").start(function, *args)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, rank_pools: Pools) -> Iterator[None]:
    """Fail a test that leaks processes, threads, descriptors, shared memory or environment."""
    allowed: set[str] = set()
    for mark in request.node.iter_markers("may_leak"):
        assert mark.kwargs.get("reason"), "may_leak needs a reason"
        assert set(mark.args) <= set(KINDS), f"may_leak knows {KINDS}"
        allowed.update(mark.args)
    before, environment = Snapshot.take(), dict(os.environ)
    yield
    items = remaining(with_pools(before, rank_pools), grace_s=leaks.GRACE_S, ignore=allowed)
    reap_orphans(but=kept_pids(rank_pools))
    restore(environment)
    if items:
        pytest.fail("the test left behind:\n  " + "\n  ".join(items), pytrace=False)


def kept_pids(pools: Pools) -> set[int]:
    """The processes that stay from test to test."""
    return server_pids().union(*(pool.pids() for pool in pools.values()))


def with_pools(before: Snapshot, pools: Pools) -> Snapshot:
    """`before` with the ranks of pools, and what forks them, as the test has made them anew."""
    open_now = descriptors()
    fds = server_fds().union(*(pool.fds() for pool in pools.values()))
    ours = dict.fromkeys(kept_pids(pools), "a pool's")
    return replace(
        before, processes=before.processes | ours, fds=before.fds | {fd: open_now[fd] for fd in fds}
    )


def restore(environment: dict[str, str]) -> None:
    """Put the environment back, so that one leak fails one test only."""
    for name in os.environ.keys() - environment.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    for name in environment.keys() - {"PYTEST_CURRENT_TEST"}:
        if os.environ.get(name) != environment[name]:
            os.environ[name] = environment[name]
