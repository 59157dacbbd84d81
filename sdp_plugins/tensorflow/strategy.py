"""A ``tf.distribute.Strategy`` for custom training loops: one process per rank."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from sdp_plugins.core import Group

from .extended import OneReplica
from .job import current

log = logging.getLogger("sdp_plugins.tensorflow")


class SMDDPStrategy(tf.distribute.Strategy):  # type: ignore[misc]
    """Trains on all ranks of a job, by loops written for MultiWorkerMirroredStrategy.

        strategy = SMDDPStrategy()
        with strategy.scope():
            model, optimizer = ...
        for batch in strategy.experimental_distribute_dataset(dataset):
            strategy.run(step, args=(batch,))

    Every rank runs the same program and is one replica. Variables created in the scope start with
    rank 0's values, so all ranks have to create them in the same order. ``run`` returns this rank's
    values. ``reduce`` and ``gather`` combine the values of all ranks, and all ranks have to call
    them. Each global batch is cut by rank into parts whose sizes differ by at most one row.
    Gradients are summed, so divide losses by the global batch size
    (``tf.nn.compute_average_loss``).

    The strategy refuses Keras' ``fit``; use ``sdp_plugins.keras.SMDDPStrategy`` for it.

    Attributes:
        group: The group of the ranks, for operations that the strategy lacks.
    """

    def __init__(self, group: Group | None = None) -> None:
        """Connect to the other ranks of this job, unless ``init()`` has done so.

        Args:
            group: A group of ranks that are already connected. None reads the launcher's variables;
                without a launcher this process is the only rank.

        Raises:
            RuntimeError: `group` is not the group of the current job.
        """
        collectives = current.join(group)
        self.group = collectives.group
        super().__init__(OneReplica(self, collectives))
        if self.group.world_size == 1:
            log.info("one rank only: nothing is communicated. To start more: sdp run -n 2 ...")

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.group.rank

    @property
    def cluster_resolver(self) -> Any:
        """This task's resolver, with worker 0 as the chief; no servers run behind it."""
        names = [f"rank{rank}" for rank in range(self.group.world_size)]
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": names}), task_type="worker", task_id=self.group.rank
        )
