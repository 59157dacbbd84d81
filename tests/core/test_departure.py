"""What a rank did before it left counts; what a signal handler asks for in a wait is refused."""

import os
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from sdp_plugins.core import Group, PeerLostError, SdpError
from tests.ranks import run_ranks


def send_and_leave(rank: int, world: int, rounds: int) -> int:
    received = 0
    for i in range(rounds):
        with Group.from_env(name=f"round-{i}") as group:
            group.barrier()
            if rank == 0:
                # Long enough for the receiver to sleep and to look for ranks that have gone.
                time.sleep(0.001 * (i % 12))
                group.send(np.full(3, i), 1)
            else:
                data = np.zeros(3, np.int64)
                group.recv(data, 0)
                received += int((data == i).all())
    return received


def reduce_and_leave(rank: int, world: int, rounds: int) -> int:
    total = 0
    for i in range(rounds):
        with Group.from_env(name=f"round-{i}") as group:
            if rank == 0:
                time.sleep(0.02 * (i % 8))  # around the 100 ms after which a waiter looks up
            data = np.ones(1, np.int64)
            group.all_reduce(data)
            total += int(data[0])
    return total


def receive_from_those_who_stay(rank: int, world: int) -> tuple[int, str]:
    with Group.from_env() as group:
        group.barrier()
        data = np.full(1, rank)
        if rank == 1:
            time.sleep(0.5)  # rank 2 has left, and rank 0 has looked
            group.send(data, 0)
        if rank != 0:
            return -1, ""
        source = group.recv(data, None).source_rank
        with pytest.raises(PeerLostError) as caught:
            group.recv(data, None)  # nobody is left who could send
        return source, str(caught.value)


def call_in_a_signal_handler(rank: int, world: int) -> str:
    with Group.from_env() as group:
        data = np.zeros(4)
        group.barrier()
        if rank == 1:
            time.sleep(1.0)
            with suppress(SdpError):  # rank 0 has come to this one
                group.barrier()
            with pytest.raises(SdpError):
                group.barrier()
            return ""
        signal.signal(signal.SIGUSR1, lambda *_: group.broadcast(data, 0))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(SdpError) as caught:
            group.barrier()
        return str(caught.value)


def test_a_signal_handler_cannot_communicate_under_a_waiting_call() -> None:
    text = run_ranks(2, call_in_a_signal_handler)[0]
    assert text.startswith("[rank 0/2] broadcast: called by a signal handler")


def test_who_leaves_in_good_order_spoils_no_receive_from_any_source() -> None:
    source, text = run_ranks(3, receive_from_those_who_stay)[0]
    assert source == 1
    assert "has closed the group" in text or "ended unexpectedly" in text


def test_a_message_of_a_rank_that_left_is_received() -> None:
    assert run_ranks(2, send_and_leave, 60)[1] == 60


def test_an_operation_of_a_rank_that_left_is_complete() -> None:
    assert run_ranks(2, reduce_and_leave, 24) == [48, 48]
