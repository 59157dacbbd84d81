"""SIGUSR1, answered by a thread: the main thread may be stuck where no Python code runs."""

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
    """Calls a function whenever the signal comes, unless the program has a handler for it.

    To Python the signal stays free: ``signal.getsignal`` returns the default, and a handler that
    the program sets replaces this one.

    Args:
        show: Called in the thread.
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
        # It inherits the mask. Signals are for the program's threads, which may await them there.
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
        """Give the signal back and end the thread."""
        if self._thread is None:
            os.close(self._wakes)
            return
        _native.give_back_report_signal(NUMBER)
        self._ending = True
        os.eventfd_write(self._wakes, 1)
        # A finalizer may come in the thread itself, or when the interpreter lets none run any more.
        if self._thread is not threading.current_thread() and not sys.is_finalizing():
            self._thread.join(_END_LIMIT_S)

    def forget(self) -> None:
        """Give the signal back where the thread does not run: in a forked child."""
        _native.give_back_report_signal(NUMBER)
        os.close(self._wakes)
