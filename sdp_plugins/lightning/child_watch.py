"""Lets the main process detect failures of the ranks that it launched."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Sequence
from subprocess import Popen

import torch.distributed as dist

from sdp_plugins.lightning.parent_watch import end_now

log = logging.getLogger(__name__)

POLL_S = 0.2
GRACE_S = 10.0  # for checkpoints on exceptions, loggers, tracebacks
GRACE_BEFORE_MEETING_S = 2.0  # the main process waits for the others in the rendezvous


class ChildWatch(threading.Thread):
    """Ends the job when a child has failed and the main process does not end by itself."""

    def __init__(self, children: Sequence[Popen[bytes]]) -> None:
        super().__init__(name="sdp-child-watch", daemon=True)
        self._children = children
        self._ended = threading.Event()
        self._reported = False

    def run(self) -> None:
        """Poll until a child fails or all have ended with 0."""
        while not (failed := self._failed()):
            if self._ended.wait(POLL_S) or all(child.poll() == 0 for child in self._children):
                return
        self._report(failed)
        grace_s = GRACE_S if dist.is_initialized() else GRACE_BEFORE_MEETING_S
        if not self._ended.wait(grace_s):
            log.error("the main process did not end in %.0f s: ending it now", grace_s)
            self._kill()
            code = next(iter(failed.values()))
            end_now(128 - code if code < 0 else code)  # as a shell gives it

    def end(self) -> None:
        """Wait for the children, then kill the rest; the caller reports its own error."""
        self._ended.set()
        self._report(self._failed())
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(c.poll() is None for c in self._children):
            time.sleep(POLL_S / 4)
        self._kill()

    def _failed(self) -> dict[int, int]:
        """Return codes of the ranks that have failed."""
        codes = {rank: child.poll() for rank, child in enumerate(self._children, start=1)}
        return {rank: code for rank, code in codes.items() if code}

    def _report(self, failed: dict[int, int]) -> None:
        if self._reported:
            return
        self._reported = bool(failed)
        for rank, code in failed.items():
            pid, ranks = self._children[rank - 1].pid, len(self._children) + 1
            log.error("[rank 0/%d] rank %d (pid %d) %s", ranks, rank, pid, describe(code))

    def _kill(self) -> None:
        for child in self._children:
            child.kill()  # has no effect on an ended one


def describe(code: int) -> str:
    """Describe a return code, with a hint."""
    if code >= 0:
        how = f"ended with exit code {code}"
    else:
        how = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        return f"{how}. Hint: a user did that, or the kernel for lack of memory (see dmesg)."
    return f"{how}. Hint: see its traceback above, if it wrote one."
