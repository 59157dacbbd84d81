"""The strategy: data parallelism for Keras 3, one process per rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from sdp_plugins.core import ElasticJob, Group
from sdp_plugins.core.config import Config
from sdp_plugins.core.rank_names import RankNames
from sdp_plugins.core.tensor_lists import gather_uneven

from . import gradients, keras_internals, losses, scope, synchronized_batch_norm
from .backends import load
from .context import TrainingContext, failure_group_of
from .data import shard_data
from .initial_sync import check_same_call
from .variables import broadcast

log = logging.getLogger("sdp_plugins.keras")
_NAME = "keras"


class SMDDPStrategy:
    """Trains Keras models on all ranks of a job.

    ::

        strategy = SMDDPStrategy()
        with strategy.scope():
            model = build()
            model.compile(optimizer, loss, metrics)
        model.fit(x, y, batch_size=256)

    Every rank runs the same program. ``batch_size`` is that of all ranks together, and all
    arguments of ``fit``, ``evaluate`` and ``predict`` have the same meaning as in one process: rank
    r reads the r-th part of each global batch. Losses and metrics are global on all ranks. All
    ranks start from rank 0's initial values. Rank 0 writes files.
    """

    def __init__(self, group: Group | None = None, *, elastic: bool = False) -> None:
        """Connect to the other ranks of this job.

        Args:
            group: A group of ranks that are already connected. None reads the launcher's variables;
                without a launcher this process is the only rank.
            elastic: Whether `fit` goes on when ranks are lost, and others join; see
                docs/elastic.md.

        Raises:
            ValueError: A group is given, and elastic: then there is no way to make others.
        """
        keras_internals.check()
        if elastic:
            self._context = _elastic_context(group)
        else:
            self._context = _context(Group.from_env(name=_NAME) if group is None else group)
        scope.install()
        if self.group.world_size == 1 and not elastic:
            log.info("one rank only: nothing is communicated. To start more: sdp run -n 2 ...")
            return
        gradients.install()
        losses.install()
        synchronized_batch_norm.install()
        scope.opened(self._context)

    @property
    def group(self) -> Group:
        """The group of the ranks that are there, for operations that the strategy lacks."""
        return self._context.group

    @property
    def rank(self) -> int:
        """This process's rank; that of one that joins an elastic job is not 0 before `fit`."""
        return 1 if self._context.join else self.group.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of ranks; 2 for a process that joins an elastic job, before `fit`."""
        return 2 if self._context.join else self.group.world_size

    @property
    def local_rank(self) -> int:
        """The rank among the ranks of this node."""
        return self.group.local_rank

    @contextmanager
    def scope(self) -> Iterator[SMDDPStrategy]:
        """Return a context; this strategy trains the models that this thread compiles in it."""
        with scope.entered(self._context):
            yield self

    # ---- for custom loops ----------------------------------------------------------------------

    def all_reduce(self, value: Any, op: str = "mean") -> Any:
        """Reduce a tensor over all ranks.

        Args:
            value: A tensor of the same shape and dtype on all ranks.
            op: ``mean``, ``sum``, ``min`` or ``max``.

        Returns:
            A new tensor of the backend, equal on all ranks.
        """
        self._context.synchronize()
        array = np.array(self._context.backend.to_numpy(value), order="C")
        self.group.all_reduce(array, "avg" if op == "mean" else op)
        return self._context.backend.from_numpy(array)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate the ranks' tensors, whose lengths may differ along the axis.

        Raises:
            CollectiveMismatchError: The tensors differ in dtype or in another dimension.
        """
        self._context.synchronize()
        array = np.moveaxis(np.asarray(self._context.backend.to_numpy(value)), axis, 0)
        whole = gather_uneven(self.group, array)
        return self._context.backend.from_numpy(np.moveaxis(whole, 0, axis))

    def broadcast_variables(self, variables: Sequence[Any], root: int = 0) -> None:
        """Copy the values of one rank's variables to all other ranks.

        Raises:
            CollectiveMismatchError: The variables differ in dtype or shape; none has changed.
        """
        self._context.synchronize()
        broadcast(self.group, variables, root)

    def distribute_dataset(self, dataset: Any) -> Any:
        """Cut each global batch of a dataset to this rank's rows.

        Args:
            dataset: Yields global batches, the same on all ranks.

        Returns:
            A dataset on the TensorFlow backend, else an iterable; each iteration is an epoch.
        """
        source = keras_internals.data_adapters.get_data_adapter(dataset)
        seed = check_same_call(self.group, "distribute_dataset")
        return self._context.backend.data_of(shard_data(source, self._context, seed))

    def close(self) -> None:
        """Leave the group."""
        self._context.backend.close()
        self._context.failure_group.close()
        self.group.close()
        if self._context.job is not None:
            self._context.job.close()
        scope.closed(self._context)


def _context(group: Group, is_elastic: bool = False) -> TrainingContext:
    return TrainingContext(group, failure_group_of(group), load(group, is_elastic))


def _elastic_context(group: Group | None) -> TrainingContext:
    """Begin an elastic job; a process that is to join one does so in `fit`, and is alone before."""
    if group is not None:
        raise ValueError(
            "SMDDPStrategy(group, elastic=True): the strategy makes a group whenever the ranks "
            "change. Hint: leave the group out, and start the ranks with sdp run --elastic MIN:MAX."
        )
    config = Config.from_env()
    if config.join is None:
        job = ElasticJob.from_env(name=_NAME)
        context = _context(job.group, is_elastic=True)
        context.job = job
        return context
    names = RankNames("keras, before it joins", 1)
    alone = Group.from_exchange(lambda blob, _: [blob], 0, names, config.wait_s, None, config)
    context = _context(alone)
    context.join = lambda: ElasticJob.from_env(name=_NAME)
    return context
