"""The Python stacks of a rank on SIGURG, which `sdp run` sends to ranks that hang.

By default SIGURG does nothing: a process that has not called `dump_on_signal` survives it.
faulthandler writes in the signal handler itself, so that a main thread that is stuck in native code
is shown too.
"""

from __future__ import annotations

import faulthandler
import signal
from contextlib import suppress

from .config import started_by_us

NUMBER = signal.SIGURG
_STDERR = 2


def dump_on_signal() -> None:
    """Write the stacks of all threads to stderr on `NUMBER`, in ranks of our own launchers.

    A script that handles the signal itself keeps its handler.
    """
    if started_by_us() and signal.getsignal(NUMBER) is signal.SIG_DFL:
        with suppress(OSError):
            faulthandler.register(NUMBER, file=_STDERR, all_threads=True)
