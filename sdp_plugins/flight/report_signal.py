"""Handles SIGUSR1 in a thread, because the main thread may be blocked in native code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from sdp_plugins.core import _native

NUMBER = signal.SIGUSR1
_BYTES = 8
_END_LIMIT_S = 5.0


class ReportSignal:
    """Calls a function in the thread on each SIGUSR1, unless the program has its own handler.

    Python does not see this handler: ``signal.getsignal`` returns the default, and a handler that
    the program sets replaces this one.
    """

    def __init__(self, show: Callable[[], None]) -> None:
        self._show = show
        self._ending = False
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        if _native.take_report_signal(NUMBER, self._wakes):
            try:
                self._start()
            except BaseException:
                self.forget()
                raise

    def _start(self) -> None:
        thread = threading.Thread(target=self._loop, name="sdp-signal", daemon=True)
        # It inherits a full mask: signals must reach the program's threads.
        before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        try:
            thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._thread = thread

    def _loop(self) -> None:
        while True:
            os.read(self._wakes, _BYTES)
            if self._ending:
                os.close(self._wakes)
                return
            try:
                self._show()
            except Exception as error:
                with suppress(Exception):
                    print(f"sdp_plugins: SIGUSR1: {error!r}", file=sys.stderr)

    def end(self) -> None:
        """Restore the signal and end the thread."""
        if self._thread is None:
            os.close(self._wakes)
            return
        _native.give_back_report_signal(NUMBER)
        self._ending = True
        os.eventfd_write(self._wakes, 1)
        # This may run in the thread itself (a finalizer), or while the interpreter shuts down.
        if self._thread is not threading.current_thread() and not sys.is_finalizing():
            self._thread.join(_END_LIMIT_S)

    def forget(self) -> None:
        """Restore the signal in a forked child, where the thread does not run."""
        _native.give_back_report_signal(NUMBER)
        os.close(self._wakes)
