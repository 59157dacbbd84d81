"""A replica group of one rank under torchft, with the settings of its train_ddp.py on CPUs."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from itertools import count
from typing import Any

from torch.nn import functional
from torch.utils.data import DataLoader
from torchft import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.checkpointing.pg_transport import PGTransport

from benchmarks.recovery.said import Teller
from benchmarks.recovery.training import BATCH, network, optimizer_of, samples


def main(setting: dict[str, Any]) -> None:
    """Train until the benchmark ends."""
    tell = Teller(setting)
    replica = int(os.environ["REPLICA_GROUP_ID"])
    replicas = int(os.environ["NUM_REPLICA_GROUPS"])
    module = network()
    inner = optimizer_of(module)

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    group = ProcessGroupGloo(timeout=timedelta(seconds=5))
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"recovery_{replica}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device="cpu"),
    )
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, inner)
    sampler = DistributedSampler(
        samples(), replica_rank=replica, num_replica_groups=replicas, group_rank=0, num_replicas=1
    )
    loader = DataLoader(samples(), BATCH, sampler=sampler)
    for epoch in count():
        sampler.set_epoch(epoch)
        for x, y in loader:
            step = manager.current_step()
            tell.began(step)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            world, takes_part = manager.num_participants(), manager.is_participating()
            optimizer.step()
            if takes_part and manager.current_step() > step:
                tell.committed(step, world)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
