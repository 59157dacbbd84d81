"""A rank under `sdp run --elastic`."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch.nn import functional

from benchmarks.recovery.said import Teller
from benchmarks.recovery.training import BATCH, FOREVER, network, optimizer_of, samples
from sdp_plugins.torch import Elastic


def main(setting: dict[str, Any]) -> None:
    """Train until the benchmark ends."""
    tell = Teller(setting)
    model = network()
    optimizer = optimizer_of(model)
    elastic = Elastic(model, optimizer)
    loader = elastic.loader(samples(), BATCH)
    for _ in elastic.epochs(FOREVER):
        for x, y in loader:
            number = elastic.progress.steps
            tell.began(number)
            with elastic.step() as step:
                world = elastic.world_size
                functional.cross_entropy(elastic.model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if not step.discarded:
                tell.committed(number, world)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
