"""The store of an elastic job's rank 0, which may end while others connect to it."""

from __future__ import annotations

import time
from threading import Event

import pytest
import torch.distributed as dist

from sdp_plugins.core import PeerLostError
from sdp_plugins.core.regroup import Meeting
from sdp_plugins.torch.meeting_store import _connected


class LeftMeeting(Meeting):
    """A meeting that rank 0 leaves at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def check(self) -> None:
        self.looks += 1
        if self.looks == 3:
            raise PeerLostError("rank 0 ended", ranks=[0])


def test_nobody_waits_for_a_store_whose_rank_has_ended() -> None:
    end = Event()

    def connect() -> dist.Store:
        end.wait(60)
        return dist.HashStore()

    began = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 0 ended"):
        _connected(connect, LeftMeeting())
    assert time.monotonic() - began < 30
    end.set()


def test_a_store_that_refuses_is_a_lost_rank() -> None:
    def connect() -> dist.Store:
        raise dist.DistNetworkError("refused")

    with pytest.raises(PeerLostError, match="does not answer: refused"):
        _connected(connect, LeftMeeting())
