"""A rank under `torchrun --max-restarts`, which goes on from a checkpoint."""

from __future__ import annotations

import json
import os
import sys
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.recovery.said import Teller
from benchmarks.recovery.training import BATCH, network, optimizer_of, samples


def main(setting: dict[str, Any]) -> None:
    """Train until the benchmark ends."""
    tell = Teller(setting, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.init_process_group("gloo")
    model = network()
    optimizer = optimizer_of(model)
    step, path = 0, Path(setting["checkpoint"])
    if path.exists():
        kept = torch.load(path)
        step = kept["step"]
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    parallel = DistributedDataParallel(model)
    sampler: DistributedSampler = DistributedSampler(samples())
    loader = DataLoader(samples(), BATCH, sampler=sampler)
    for epoch in count(step // len(loader)):
        sampler.set_epoch(epoch)
        for x, y in islice(loader, step % len(loader), None):
            tell.began(step)
            functional.cross_entropy(parallel(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            tell.committed(step, dist.get_world_size())
            step += 1
            if dist.get_rank() == 0 and step % setting["checkpoint_steps"] == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({"step": step, **state}, f"{path}.new")
                os.replace(f"{path}.new", path)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
