"""A ``tf.distribute.Strategy`` for training loops of one's own: one process per rank."""

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

    Every rank runs the same program and is one replica. Variables made in the scope begin with rank
    0's values, so all ranks make them in the same order. What ``run`` returns is this rank's;
    ``reduce`` and ``gather`` combine what all ranks have, and are called by all. Each global batch
    is cut by rank into parts that differ by a row at most: divide losses by the global batch
    (``tf.nn.compute_average_loss``), for gradients are summed.

    Keras' ``fit`` is refused: ``sdp_plugins.keras.SMDDPStrategy`` is for it.

    Attributes:
        group: The ranks' group, for whatever is not here.
    """

    def __init__(self, group: Group | None = None) -> None:
        """Meet the ranks of this job, unless ``init()`` has done so.

        Args:
            group: Ranks that have met; None: the launcher's variables say who they are, and without
                a launcher this process is alone.

        Raises:
            RuntimeError: There is a group, but the job has another one.
        """
        job = current.join(group)
        self.group = job.group
        super().__init__(OneReplica(self, job))
        if self.group.world_size == 1:
            log.info("one rank only: nothing is communicated. To start more: sdp run -n 2 ...")

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.group.rank

    @property
    def cluster_resolver(self) -> Any:
        """Says which task this is, worker 0 being the chief; there are no servers behind it."""
        names = [f"rank{rank}" for rank in range(self.group.world_size)]
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": names}), task_type="worker", task_id=self.group.rank
        )
