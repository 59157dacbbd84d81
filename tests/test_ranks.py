"""The tests' own tools: ranks and the leak fixture."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.leaks import no_leaks, reap_orphans
from tests.processes import wait_until_gone
from tests.ranks import HANG_S, RankFailure, RankPool, kept, run_ranks, say, start_ranks


def describe(rank: int, world: int, text: str) -> tuple[int, int, str, str, str]:
    return rank, world, text, os.environ["RANK"], os.environ["SDP_JOB_ID"]


def fail_on_one(rank: int, world: int) -> int:
    print(f"rank {rank} was here")
    if rank == 1:
        raise ValueError("the reason")
    return rank


def sleep_long(rank: int, world: int) -> None:
    say("asleep")
    time.sleep(600)


def exit_early(rank: int, world: int) -> None:
    sys.exit(7 if rank == 0 else 0)


def leave_child(rank: int, world: int) -> None:
    subprocess.Popen(["sleep", "600"])


def count_calls(rank: int, world: int) -> int:
    kept["calls"] = kept.get("calls", 0) + 1
    return int(kept["calls"])


def test_results_come_in_rank_order() -> None:
    results = run_ranks(3, describe, "a b")
    assert [r[:4] for r in results] == [(i, 3, "a b", str(i)) for i in range(3)]
    assert len({r[4] for r in results}) == 1


def test_source_instead_of_function() -> None:
    assert run_ranks(2, "def main(rank, world, x): return rank * x", 5) == [0, 5]


def test_a_source_has_an_interpreter_of_its_own() -> None:
    source = "import sys\ndef main(rank, world): return 'pytest' in sys.modules"
    assert run_ranks(2, source) == [False] * 2
    assert [imported for imported, *_ in run_ranks(2, look_around)] == [True] * 2


def look_around(rank: int, world: int) -> tuple[bool, int, int]:
    return "pytest" in sys.modules, hash("x"), id(look_around)


def test_neighbours_share_neither_hashes_nor_addresses() -> None:
    _, hashes, addresses = zip(*run_ranks(2, look_around), strict=True)
    assert len(set(hashes)) == 2
    assert len(set(addresses)) == 2


ABANDON = """
import os, sys
sys.path.insert(0, {root!r})
from tests.ranks import start_ranks
from tests.test_ranks import sleep_long
ranks = start_ranks(2, sleep_long)
assert [rank.heard() for rank in ranks] == ["asleep"] * 2
print(*(rank.pid for rank in ranks), flush=True)
os._exit(0)
"""


def test_ranks_die_with_the_test_process() -> None:
    source = ABANDON.format(root=str(Path(__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    wait_until_gone(map(int, done.stdout.split()))


def test_failure_shows_every_rank() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, fail_on_one)
    text = str(caught.value)
    assert "the reason" in text and "rank 0 was here" in text and "rank 1 was here" in text
    assert [o.kind for o in caught.value.outcomes] == ["returned", "raised"]


def test_deadline_shows_the_stack() -> None:
    with pytest.raises(RankFailure, match="sleep_long"):
        run_ranks(2, sleep_long, timeout_s=1)


def test_early_exit_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="exited with 7"):
        run_ranks(2, exit_early)


def test_left_process_is_a_failure() -> None:
    with pytest.raises(RankFailure, match=r"processes left by ranks \[0\]"):
        run_ranks(1, leave_child)


def test_killed_rank() -> None:
    with start_ranks(2, sleep_long) as ranks:
        assert ranks[1].heard() == "asleep"
        ranks[1].kill(signal.SIGKILL)
        assert ranks[1].outcome().exitcode == -signal.SIGKILL
        assert ranks[0].outcome(0.05).kind == "running"


def test_original_exception_comes_back() -> None:
    with start_ranks(2, fail_on_one) as ranks:
        with pytest.raises(ValueError, match="the reason"):
            ranks[1].result()
        assert ranks[0].result() == 0


def test_pool_keeps_processes_and_recovers(rank_pool: Callable[[int], RankPool]) -> None:
    pool = rank_pool(2)
    first = pool.run(count_calls)
    assert pool.run(count_calls) == [first[0] + 1] * 2
    jobs = [pool.run(describe, "")[0][4] for _ in range(2)]
    assert jobs[0] != jobs[1]
    with pytest.raises(RankFailure, match="the reason"):
        pool.run(fail_on_one)
    assert pool.run(count_calls) == [1, 1]


def test_a_death_between_cases_fails_one_case(rank_pool: Callable[[int], RankPool]) -> None:
    pool = rank_pool(2)
    pool.run(count_calls)
    assert pool.ranks is not None
    pool.ranks[1].kill()
    os.waitid(os.P_PID, pool.ranks[1].pid, os.WEXITED | os.WNOWAIT)
    reap_orphans(pool.pids())
    with pytest.raises(RankFailure, match=f"exited with -{signal.SIGKILL:d}"):
        pool.run(count_calls)
    assert pool.run(count_calls) == [1, 1]


@pytest.mark.parametrize("kind", ["processes", "threads", "fds", "shm", "env"])
def test_leaks_are_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    undo: list[Callable[[], object]] = []

    def leak() -> None:
        if kind == "processes":
            child = subprocess.Popen(["sleep", "600"])
            undo.extend([child.kill, child.wait])
        elif kind == "threads":
            thread = threading.Thread(target=release.wait)
            thread.start()
            undo.extend([release.set, thread.join])
        elif kind == "fds":
            fd = os.memfd_create("leak")
            undo.append(lambda: os.close(fd))
        elif kind == "shm":
            path = Path(f"/dev/shm/sdp_leak_test_{os.getpid()}")
            file = path.open("x")
            undo.extend([file.close, path.unlink])
        else:
            monkeypatch.setenv("SDP_LEAK_TEST", "1")
            undo.append(monkeypatch.undo)

    with pytest.raises(AssertionError, match="left behind"), no_leaks(grace_s=0.1):
        leak()
    for step in undo:
        step()


def test_fixture_fails_a_leaking_test(tmp_path: Path) -> None:
    (tmp_path / "test_leaks.py").write_text(
        textwrap.dedent("""
            import os, pytest, tests.leaks
            tests.leaks.GRACE_S = 0.1
            def test_bad(): os.memfd_create("x")
            @pytest.mark.may_leak("fds", reason="to show it")
            def test_excused(): os.memfd_create("y")
            def test_good(): pass
        """)
    )
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p"]
    command += ["tests.conftest", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=HANG_S)
    assert "memfd:x" in done.stdout and "memfd:y" not in done.stdout, done.stdout
    assert "3 passed, 1 error" in done.stdout, done.stdout
