"""SIGTERM ends a training at the end of the step, as preempted jobs rely on."""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


def terminate_between_steps(trainer: Any) -> None:
    """Have Lightning's handler of SIGTERM only take a note.

    From 2.6 on it also calls a collective, wherever the signal happens to find each rank. Some
    backends get through with that; here it is refused, as ranks that call different operations are.
    Every rank gets the signal, is in the same step as the others, and looks at the note when its
    step ends.
    """
    connector = trainer._signal_connector
    if not hasattr(connector, "_sigterm_notifier_fn"):
        return

    def note(number: int, frame: FrameType | None) -> None:
        log.info("[rank %d] received %s", trainer.global_rank, signal.Signals(number).name)
        if not connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(number)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note
