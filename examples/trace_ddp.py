"""Trace a few steps of DistributedDataParallel, to see what goes on beside the backward pass.

sdp run -n 2 --trace /tmp/ddp examples/trace_ddp.py
python -m benchmarks.overlap /tmp/ddp
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins import trace

WIDTH, LAYERS, ROWS, STEPS = 1024, 8, 128, 12


def build() -> torch.nn.Module:
    """A model whose gradients fill a dozen buckets."""
    layers = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def main() -> None:
    """In every rank."""
    dist.init_process_group("smddp")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(build(), bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x = torch.randn(ROWS, WIDTH)
        with trace.span("step" if step > 2 else "warm-up"):  # DDP makes its buckets anew after one
            with trace.span("forward"):
                loss = model(x).square().mean()
            with trace.span("backward"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
