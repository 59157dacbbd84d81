"""Makes SIGTERM end the training after the current step, as preempted jobs require."""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


def terminate_between_steps(trainer: Any) -> None:
    """Make Lightning's SIGTERM handler only set a flag.

    From 2.6 on, the handler also calls a collective, at whatever point the signal reaches each
    rank. smddp refuses that, because the ranks are in different operations. Without it, every rank
    receives the signal in the same step and checks the flag when the step ends.
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
