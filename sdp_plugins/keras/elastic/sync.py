"""The callback that tells an elastic training where Keras' `fit` is."""

from __future__ import annotations

from typing import Any

from ..initial_sync import InitialSync
from .fit import ElasticFit


class ElasticSync(InitialSync):
    """Compares the ranks' models, in parts that are repeated when a rank is lost."""

    def __init__(self, fit: ElasticFit) -> None:
        super().__init__(fit.context)
        self._fit = fit

    def on_train_begin(self, logs: Any = None) -> None:
        """Compare the models, and copy values from rank 0."""
        self._in_fit = True
        self._fit.begin(super().on_train_begin)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin an epoch."""
        super().on_epoch_begin(epoch, logs)
        self._fit.begin_epoch(epoch)

    def on_test_begin(self, logs: Any = None) -> None:
        """Begin a validation."""
        self._fit.begin_test()

    def on_test_end(self, logs: Any = None) -> None:
        """End a validation."""
        self._fit.end_test()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compare ``stop_training`` and the weights."""
        self._fit.end_epoch(lambda: super(ElasticSync, self).on_epoch_end(epoch, logs))
