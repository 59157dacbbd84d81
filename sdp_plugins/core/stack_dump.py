"""The Python stacks of a rank on SIGURG, which `sdp run` sends to ranks that hang.

SIGURG is ignored by default, so a process that has not called `dump_on_signal` survives it.
faulthandler writes in the signal handler itself, so it also shows a main thread that is blocked in
native code.
"""

from __future__ import annotations

import faulthandler
import signal
from contextlib import suppress

from .config import started_by_us

NUMBER = signal.SIGURG
_STDERR = 2


def dump_on_signal() -> None:
    """Write the stacks of all threads to stderr on `NUMBER`, in ranks of this package's launchers.

    A script that handles the signal itself keeps its handler.
    """
    if started_by_us() and signal.getsignal(NUMBER) is signal.SIG_DFL:
        with suppress(OSError):
            faulthandler.register(NUMBER, file=_STDERR, all_threads=True)
