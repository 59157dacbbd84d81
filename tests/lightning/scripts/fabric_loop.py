"""A script for Fabric that knows nothing of us: python fabric_loop.py PACKAGE STRATEGY [RANK]

With RANK that rank raises in the second step.
"""

import importlib
import sys
import time

import torch

package, strategy, failing = [*sys.argv[1:], ""][:3]


def main():
    fabric = importlib.import_module(package).Fabric(
        accelerator="cpu", strategy=strategy, devices=2
    )
    fabric.launch()
    torch.manual_seed(1 + fabric.global_rank)
    module = torch.nn.Linear(4, 2)
    module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(3):
        if step == 1 and str(fabric.global_rank) == failing:
            print(f"failed at {time.monotonic()}", flush=True)
            raise ArithmeticError("a fault of the script")
        fabric.backward(module(torch.randn(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    result = module.module.weight.sum().item()
    print(f"rank {fabric.global_rank} of {fabric.world_size}: {result:.6f}", flush=True)


if __name__ == "__main__":
    main()
