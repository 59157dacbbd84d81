"""Ends a rank whose launching process has ended before the group was made."""

from __future__ import annotations

import logging
import os
import sys
import threading

log = logging.getLogger(__name__)

LAUNCHER_PID = "SDP_LAUNCHER_PID"
POLL_S = 0.5


def end_now(code: int) -> None:
    """End this process from a thread, because the main thread may be blocked in native code."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class ParentWatch:
    """Context in which this process ends when the one that launched it as a rank has ended.

    For the time of the rendezvous only, in which torch's store would wait 30 minutes for rank 0;
    afterwards the group itself notices a lost rank.
    """

    def __init__(self) -> None:
        self._pid = os.environ.get(LAUNCHER_PID, "")
        self._left = threading.Event()

    def __enter__(self) -> None:
        if self._pid not in ("", str(os.getpid())) and "LOCAL_RANK" in os.environ:
            threading.Thread(target=self._watch, name="sdp-parent-watch", daemon=True).start()

    def __exit__(self, *exc_info: object) -> None:
        self._left.set()
        os.environ.pop(LAUNCHER_PID, None)  # jobs that this rank starts have another launcher

    def _watch(self) -> None:
        while str(os.getppid()) == self._pid:
            if self._left.wait(POLL_S):
                return
        log.error("rank 0 (pid %s), which launched this rank, has ended: ending too", self._pid)
        end_now(1)
