"""How `sdp run --timeout` and time-outs of ranks end a job, and what they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.launch.jobs import HANGING, LAUNCHER, Script, launch


def test_time_out(script: Script) -> None:
    done = launch("-n", "2", "--timeout", "1", script("if rank: time.sleep(600)"))
    assert done.returncode == 124
    assert "still running: rank 1" in done.stderr


def test_a_time_out_shows_who_waits_and_where_ranks_are(script: Script) -> None:
    done = launch("-n", "2", "--timeout", "15", script(HANGING))
    assert done.returncode == 124
    _, _, last = done.stderr.partition("time-out reached; still running: ranks 0, 1\n")
    assert re.search(r"  rank 0 has waited [\d.]+ s in barrier #\d+ for rank 1\n", last), (
        done.stderr
    )
    assert re.search(r'\[rank 1\]   File ".*a script 0.py", line \d+ in asleep\n', last)
    assert re.search(r'\[rank 0\]   File ".*collectives.py", line \d+ in barrier\n', last)


BUSY = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])  # in the threads that follow, too
from sdp_plugins.core import Group
def busy():
    while signal.SIGURG not in signal.sigpending(): time.sleep(0.01)
    time.sleep(0.2)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGURG])
with Group.from_env(): busy()
time.sleep(600)
"""
SLOW_TO_READ = """
import runpy, time
from sdp_plugins.launch import supervise
supervise.who_waits = lambda: time.sleep(3) or "slow"
runpy.run_module("sdp_plugins.launch", run_name="__main__", alter_sys=True)
"""


def test_ranks_write_their_stacks_however_long_it_takes_to_read_them(script: Script) -> None:
    path = script(BUSY)
    slow = [sys.executable, "-c", SLOW_TO_READ, "run"]
    done = launch("-n", "1", "--timeout", "5", path, launcher=slow)
    assert done.returncode == 124
    assert "in busy\n" in done.stderr


def test_a_time_out_of_a_rank_names_who_is_absent(script: Script) -> None:
    done = launch("-n", "2", script(HANGING), env={**os.environ, "SDP_TIMEOUT_S": "10"})
    assert done.returncode == 1
    _, _, last = done.stderr.rpartition("\nsdp run: ")
    assert re.match(r"rank 1 did not arrive at barrier #\d+ in 10 s; rank 0 \(pid ", last), (
        done.stderr
    )
    assert "CollectiveTimeoutError" in last
    assert re.search(r'\[rank 1\]   File ".*a script 0.py", line \d+ in asleep\n', done.stderr)


IN_A_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")


@pytest.mark.skipif(os.geteuid() != 0, reason="pid namespaces need root")
def test_a_launcher_that_is_process_1_finds_its_ranks(script: Script) -> None:
    if subprocess.run([*IN_A_CONTAINER, "true"], check=False).returncode:
        pytest.skip("no pid namespaces here")
    inside = [*IN_A_CONTAINER, *LAUNCHER]
    done = launch("-n", "2", "--timeout", "20", script(HANGING), launcher=inside)
    assert done.returncode == 124
    assert "for rank 1" in done.stderr


def test_a_time_out_of_many_days(script: Script) -> None:
    done = launch("-n", "1", "--timeout", "1e10", script("time.sleep(0.2)"))
    assert done.returncode == 0, done.stderr


def test_the_time_is_up_while_ranks_are_started(script: Script) -> None:
    done = launch("-n", "400", "--timeout", "0.3", script("time.sleep(60)"))
    assert done.returncode == 124
    assert "sdp run: time-out reached; " in done.stderr and "399" not in done.stderr
