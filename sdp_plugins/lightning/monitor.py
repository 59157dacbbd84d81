"""A callback that logs this rank's communication: a mixin for any Lightning package's Callback."""

from __future__ import annotations

from typing import Any

from sdp_plugins.core.communication_log import CommunicationLog
from sdp_plugins.lightning.namespaces import TRAINER, LightningClass, concrete_class


class SMDDPMonitor(LightningClass):
    """Logs how much of the time goes to communication, and which rank the others wait for.

    ::

        Trainer(strategy="smddp", callbacks=[SMDDPMonitor()])

    Every `log_every_n_steps`, the Trainer's loggers get what `CommunicationLog.look` returns, of
    rank 0. Makes an object for the Lightning package in use: see `sdp_plugins.lightning`.
    """

    _packages = TRAINER
    _log: CommunicationLog | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the class for the Lightning package in use, as pathlib.Path does."""
        if cls is SMDDPMonitor:
            cls = concrete_class(cls._packages, cls.__name__)
        return super().__new__(cls)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count."""
        self._log = _log_of_job()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log at the steps at which the Trainer logs."""
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        accumulates = pl_module.automatic_optimization and trainer.fit_loop._should_accumulate()
        if not trainer.loggers or accumulates or (step + 1) % trainer.log_every_n_steps:
            return
        if self._log is None or self._log.group.closed:  # ranks were lost, or have joined
            self._log = _log_of_job()
            return
        values = self._log.look()
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Let go of the group."""
        self._log = None


def _log_of_job() -> CommunicationLog | None:
    """That of the default group; None if smddp has no part in it."""
    import torch.distributed as dist

    from sdp_plugins.torch.groups import core_group

    group = core_group() if dist.is_initialized() else None
    return CommunicationLog(group) if group else None
