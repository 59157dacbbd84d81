"""A rank that arrives late writes nothing into the memory of a rank that has given up."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import Group, SdpError
from tests.ranks import Start

COUNT = 2**20  # reduced in place, in memory that the ranks map
LIMIT_S = 60.0


class Interrupt(Exception):
    """Raised by a signal handler."""


def interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupt


def interrupted(group: Group, data: Any) -> None:
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    group.all_reduce(data)


def timed_out(group: Group, data: Any) -> None:
    group.all_reduce(data, timeout_s=0.3)


def aborted(group: Group, data: Any) -> None:
    work = group.all_reduce(data, async_op=True)
    time.sleep(0.3)  # until it waits for the other rank
    group.abort("enough")
    work.wait()


def closed(group: Group, data: Any) -> None:
    work = group.all_reduce(data, async_op=True)
    time.sleep(0.3)
    group.close()
    work.wait()


EXITS: dict[str, Callable[[Group, Any], None]] = {
    exit.__name__: exit for exit in (interrupted, timed_out, aborted, closed)
}


def leave_early(rank: int, world: int, name: str, folder: str) -> list[float] | str:
    """Rank 0 uses its buffer again after a failure; rank 1 comes only then."""
    refilled, arrived = Path(folder, "refilled"), Path(folder, "arrived")
    with Group.from_env(timeout_s=LIMIT_S) as group:
        data = np.frombuffer(group.allocate(4 * COUNT), np.float32)
        data[:] = 1
        group.all_reduce(data)
        assert group.last_path == "zero-copy"
        if rank == 1:
            wait_for(refilled)
            with pytest.raises(SdpError) as caught:
                group.all_reduce(data)
            arrived.touch()
            return str(caught.value)
        with pytest.raises((SdpError, Interrupt)):
            EXITS[name](group, data)
        data[:] = 7
        refilled.touch()
        wait_for(arrived)
        return np.unique(data).tolist()  # type: ignore[no-any-return]


def wait_for(path: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("name", EXITS)
def test_a_buffer_belongs_to_its_rank_after_a_failure(
    start_pooled: Start, tmp_path: Path, name: str
) -> None:
    with start_pooled(2, leave_early, name, str(tmp_path)) as ranks:
        values, message = ranks.results()
        assert values == [7]
        assert "rank 0" in message
