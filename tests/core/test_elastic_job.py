"""Ranks that are lost, and others that join, while a job runs."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from sdp_plugins.core import (
    ElasticJob,
    PeerLostError,
    RendezvousError,
    RendezvousTimeoutError,
    SdpError,
)
from sdp_plugins.core.rank_names import name_ranks
from sdp_plugins.core.regroup import Handle, Meeting, Participant, RosterFile
from sdp_plugins.core.regroup.regrouping import Regrouping
from tests.faults import die, wait_for_go
from tests.leaks import no_leaks
from tests.ranks import HANG_S, Ranks, run_ranks, say, start_ranks

TIMEOUT_S = 30.0
STOPPED_S = 5.0


def total(job: ElasticJob) -> list[int]:
    """What all ranks of the group add up to: 1 for each, and their numbers in the job."""
    mine = np.zeros(16, np.int64)
    assert job.group.global_ranks is not None
    mine[job.group.global_ranks[job.group.rank]] = 1
    job.group.all_reduce(mine)
    return [int(number) for number in np.flatnonzero(mine)]


def is_without(victim: int, there: list[int]) -> bool:
    return victim not in there


def until_it_fails(job: ElasticJob) -> None:
    while True:
        total(job)


def go_on(job: ElasticJob, until: Callable[[list[int]], bool]) -> list[int]:
    """Reduce until the group is as the test wants it; regroup whenever that fails."""
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        with suppress(SdpError):
            there = total(job)
            waiting = np.array([job.waiting()])
            job.group.all_reduce(waiting, "max")
            if until(there):
                return there
            if waiting[0] == 0:
                continue
        job.regroup()
    raise AssertionError("the group has not become what it should")


def lose(rank: int, world: int, victims: list[int]) -> list[int]:
    with ElasticJob.from_env(timeout_s=TIMEOUT_S) as job:
        left = total(job)
        assert left == list(range(world))
        for victim in victims:
            if rank == victim:
                die()
            left = go_on(job, partial(is_without, victim))
        return left


@pytest.mark.parametrize("victims", [[0], [3], [1, 0, 2], [2, 1, 3]])
def test_the_others_go_on(victims: list[int]) -> None:
    with start_ranks(4, lose, victims) as ranks:
        left = [rank for rank in range(4) if rank not in victims]
        assert [ranks[rank].result() for rank in left] == [left] * len(left)


def fail(rank: int, world: int) -> object:
    with ElasticJob.from_env(timeout_s=TIMEOUT_S) as job:
        if rank == 1:
            total(job)
            raise ValueError("no more files")
        with pytest.raises(SdpError) as caught:
            until_it_fails(job)
        job.regroup()
        return str(caught.value), total(job)


def test_the_others_are_told_of_an_error() -> None:
    with start_ranks(3, fail) as ranks:
        for rank in (0, 2):
            told, left = ranks[rank].result()
            assert "rank 1" in told and "ValueError: no more files" in told, told
            assert left == [0, 2]
        with pytest.raises(ValueError, match="no more files"):
            ranks[1].result()


def lose_at_once(rank: int, world: int, victims: list[int]) -> list[int]:
    with ElasticJob.from_env(timeout_s=TIMEOUT_S) as job:
        total(job)
        if rank in victims:
            wait_for_go()
        return go_on(job, lambda there: not set(victims) & set(there))


@pytest.mark.parametrize("victims", [[0, 1], [1, 4], [0, 2, 3, 4]])
@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_several_are_lost(victims: list[int], pause_s: float) -> None:
    """Dead processes have no vote: one of five may be left."""
    with start_ranks(5, lose_at_once, victims) as ranks:
        for victim in victims:
            assert ranks[victim].heard() == "waiting"
        for victim in victims:
            ranks[victim].kill()
            time.sleep(pause_s)  # perhaps while the others regroup
        left = [rank for rank in range(5) if rank not in victims]
        assert [ranks[rank].result() for rank in left] == [left] * len(left)


def die_when_forming(rank: int, world: int, victim: int, at: int) -> list[int]:
    """A rank ends in the middle of a regrouping: once the ranks have met, or later."""
    with ElasticJob.from_env(timeout_s=TIMEOUT_S) as job:
        if rank == 3:
            die()
        with pytest.raises(SdpError):
            until_it_fails(job)
        if rank == victim:
            regroup, calls = Participant.regroup, []

            def dying(participant: Participant, form: Callable[..., Any], *args: Any) -> Any:
                def form_or_die(meeting: Meeting) -> Any:
                    calls.append(1)
                    if len(calls) == at:
                        die()
                    return form(meeting)

                return regroup(participant, form_or_die, *args)

            with patch.object(Participant, "regroup", dying), suppress(SdpError):
                job.regroup()
            die()
        job.regroup()
        return go_on(job, lambda there: victim not in there)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("at", [1, 2])
def test_another_is_lost_while_they_regroup(victim: int, at: int) -> None:
    with start_ranks(4, die_when_forming, victim, at) as ranks:
        left = [rank for rank in range(3) if rank != victim]
        assert [ranks[rank].result() for rank in left] == [left] * len(left)


def be_stopped(rank: int, world: int, victim: int) -> object:
    job = ElasticJob.from_env(timeout_s=TIMEOUT_S)
    total(job)
    job.group.timeout_s = STOPPED_S
    if rank != victim:
        say("going")
        return go_on(job, lambda there: victim not in there)
    say(os.getpid())
    try:
        return go_on(job, lambda there: False)
    except SdpError as error:
        return error


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_stopped_rank_is_left_out(victim: int) -> None:
    with start_ranks(4, be_stopped, victim) as ranks:
        pid = ranks[victim].heard()
        left = [rank for rank in range(4) if rank != victim]
        for rank in left:
            ranks[rank].heard()
        os.kill(pid, signal.SIGSTOP)
        assert [ranks[rank].result() for rank in left] == [left] * 3
        os.kill(pid, signal.SIGCONT)
        error = ranks[victim].result()
        assert isinstance(error, RendezvousError)
        went = f"{name_ranks(left)} went on without this one"
        assert "ended" in str(error) or went in str(error)


def stop_when_following(rank: int, world: int) -> object:
    """Rank 1 dies, and rank 2 stops once it is connected to the one that leads."""
    job = ElasticJob.from_env(timeout_s=TIMEOUT_S)
    total(job)
    job.group.timeout_s = STOPPED_S
    if rank == 1:
        die("dies")
    follow = Regrouping._follow

    def stop(regrouping: Regrouping, leader: Any) -> Any:
        say(os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        return follow(regrouping, leader)

    with pytest.raises(SdpError):
        until_it_fails(job)
    if rank == 0:
        job.regroup(timeout_s=STOPPED_S)
        return total(job)
    with patch.object(Regrouping, "_follow", stop), pytest.raises(RendezvousError) as caught:
        job.regroup(timeout_s=STOPPED_S)
    return str(caught.value)


def test_a_rank_that_stops_while_they_regroup_is_left_out() -> None:
    with start_ranks(3, stop_when_following) as ranks:
        pid = ranks[2].heard()
        assert ranks[0].result() == [0]
        os.kill(pid, signal.SIGCONT)
        assert "Hint: " in ranks[2].result()


def be_alone(rank: int, world: int) -> object:
    """The others may live, and have a network between them: who is alone must not go on."""
    job = ElasticJob.from_env(timeout_s=TIMEOUT_S)
    job.group.timeout_s = STOPPED_S
    if rank > 0:
        say(os.getpid())
        time.sleep(HANG_S)
    with pytest.raises(SdpError):
        until_it_fails(job)
    with pytest.raises(RendezvousTimeoutError) as caught:
        job.regroup(timeout_s=STOPPED_S)
    return str(caught.value), caught.value.ranks


def test_the_smaller_part_does_not_go_on() -> None:
    with start_ranks(4, be_alone) as ranks:
        for rank in (1, 2, 3):
            os.kill(ranks[rank].heard(), signal.SIGSTOP)
        text, missing = ranks[0].result()
        assert missing == (1, 2, 3)
        assert "did not come in 5 s, and may go on without this rank" in text
        for rank in (1, 2, 3):
            ranks[rank].kill(signal.SIGCONT)


# ---- joining -------------------------------------------------------------------------------------


def lead(rank: int, world: int, last: int) -> list[int]:
    with ElasticJob.from_env(timeout_s=TIMEOUT_S) as job:
        if rank == 0:
            say(job.handles)
        there = go_on(job, lambda there: len(there) == last)
        job.group.barrier()
        return there


def join(rank: int, world: int) -> list[int]:
    with ElasticJob.from_env(timeout_s=TIMEOUT_S) as job:
        there = go_on(job, lambda there: len(there) == world)
        job.group.barrier()
        return there


def joining(
    handles: list[str],
    rank: int,
    world: int,
    function: Callable[[int, int], list[int]] = join,
    more: Mapping[str, str] | None = None,
) -> Ranks:
    env: dict[str, str | None] = {
        "SDP_JOIN": ",".join(handles),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        **(more or {}),
    }
    return start_ranks(1, function, env=env)


@pytest.mark.parametrize(("starting", "numbers"), [(2, [2]), (1, [1, 2]), (3, [0, 3, 4])])
def test_others_join(starting: int, numbers: list[int]) -> None:
    """Also several at once, and one whose number another has: it gets the lowest that is free."""
    world = starting + len(numbers)
    with start_ranks(starting, lead, world) as ranks:
        handles = ranks[0].heard()
        newcomers = [joining(handles, number, world) for number in numbers]
        try:
            found = [*ranks.results(), *(newcomer[0].result() for newcomer in newcomers)]
        finally:
            for newcomer in newcomers:
                newcomer.close()
    assert found == [list(range(world))] * world


def lose_and_wait(rank: int, world: int) -> list[int]:
    with ElasticJob.from_env(timeout_s=HANG_S) as job:  # another process has to start meanwhile
        if rank == 1:
            say(job.handles)
            say("lost")
        if rank == 0:
            die()
        with pytest.raises(SdpError):
            until_it_fails(job)
        job.regroup(minimum=world)
        there = go_on(job, lambda there: True)
        job.group.barrier()
        return there


def test_a_replacement_has_the_number_of_the_lost_rank() -> None:
    """The others wait for it; it is the lowest, so that one of them leads with a higher rank."""
    with start_ranks(3, lose_and_wait) as ranks:
        handles = ranks[1].heard()
        assert ranks[1].heard() == "lost"
        with joining(handles, 0, 3) as newcomer:
            assert newcomer[0].result() == [0, 1, 2]
        assert [ranks[rank].result() for rank in (1, 2)] == [[0, 1, 2]] * 2


def test_nobody_is_left_to_join() -> None:
    with start_ranks(1, lead, 1) as ranks:
        handles = ranks[0].heard()
        ranks.results()
    lost = pytest.raises(PeerLostError, match="no rank of the job is left to join")
    with joining(handles, 0, 1) as newcomer, lost:
        newcomer[0].result()


def leave(rank: int, world: int) -> None:
    with ElasticJob.from_env(timeout_s=TIMEOUT_S) as job:
        say(job.handles)
        go_on(job, lambda there: there == [0, 1])


def outlive(rank: int, world: int) -> list[int]:
    with ElasticJob.from_env(timeout_s=TIMEOUT_S) as job:
        there = go_on(job, lambda there: there == [1, 2])
        job.group.barrier()
        return there


def test_one_joins_that_has_handles_of_the_dead_only() -> None:
    """The launcher's file has the rosters that were made since it got them."""
    with closing(RosterFile()) as rosters:
        env = {"SDP_ROSTERS": rosters.path}
        with start_ranks(1, leave, env=env) as first:
            handles = first[0].heard()
            with joining(handles, 1, 3, outlive, env) as second:
                first.results()
                with joining(handles, 2, 3, outlive, env) as third:
                    assert third[0].result() == second[0].result() == [1, 2]


# ---- what must not matter ------------------------------------------------------------------------


def be_disturbed(rank: int, world: int) -> list[int]:
    with ElasticJob.from_env(timeout_s=TIMEOUT_S) as job:
        if rank == 0:
            say(job.handles)
            say("going")
        while True:
            try:
                total(job)
            except SdpError:
                break
            assert job.waiting() == 0
            if rank == 2:
                wait_for_go()
        job.regroup()
        return total(job)


def test_strangers_have_no_effect() -> None:
    with start_ranks(3, be_disturbed) as ranks:
        handles = [Handle.parse(text) for text in ranks[0].heard()]
        ranks[0].heard()
        sockets = []
        for handle in handles:
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2{}", b"\xff" * 9, b"\0\0\0\1"):
                sockets.append(socket.create_connection((handle.host, handle.port)))
                sockets[-1].sendall(said)
            lie = b'{"secret": "0", "version": 1, "member": [0, "h:1/s"], "roster": null}'
            sockets[-1].sendall(len(lie).to_bytes(4, "big") + lie)
        assert ranks[2].heard() == "waiting"
        ranks[2].kill()
        assert [ranks[rank].result() for rank in (0, 1)] == [[0, 1]] * 2
        for sock in sockets:
            sock.close()


def lose_a_parent(rank: int, world: int) -> list[int]:
    with ElasticJob.from_env(timeout_s=TIMEOUT_S) as job:
        total(job)
        if rank == 1:
            if os.fork() == 0:
                time.sleep(HANG_S)
                os._exit(0)
            die()
        return go_on(job, lambda there: 1 not in there)


def test_a_lost_rank_has_a_forked_child() -> None:
    """Data loaders fork; their copies of descriptors must not make the rank seem alive."""
    with start_ranks(3, lose_a_parent) as ranks:
        assert [ranks[rank].result(TIMEOUT_S / 2) for rank in (0, 2)] == [[0, 2]] * 2


def leave_nothing(rank: int, world: int) -> None:
    with ElasticJob.from_env(timeout_s=TIMEOUT_S):
        pass
    with no_leaks():
        with ElasticJob.from_env(timeout_s=TIMEOUT_S) as job:
            for _ in range(5):
                total(job)
                job.regroup()
            assert total(job) == [0, 1, 2]
            job.group.barrier()
        del job


def test_nothing_is_left() -> None:
    run_ranks(3, leave_nothing)
