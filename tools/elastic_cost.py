"""What an elastic job adds to a DDP step and to a 4 KiB all_reduce, when no rank is lost.

sdp run --elastic 2:2 tools/elastic_cost.py [PAIRS] [STEPS]

A small step in `elastic.step()` and without it, and an all_reduce of the elastic default group and
of an ordinary group of the same ranks; blocks of each, in turns.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from sdp_plugins.torch import Elastic


def compare(what: str, plain: Callable[[], object], elastic: Callable[[], object]) -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 31
    calls = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    times: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(pairs + 1):
        for is_elastic in (False, True) if pair % 2 else (True, False):
            call = elastic if is_elastic else plain
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if pair:  # the first warms up
                times[is_elastic].append(1e6 * (time.perf_counter() - start) / calls)
    more = [a - b for a, b in zip(times[True], times[False], strict=True)]
    base, extra = statistics.median(times[False]), statistics.median(more)
    if dist.get_rank() == 0:
        print(f"{what}: {base:.1f} us, elastic {extra:+.1f} us ({100 * extra / base:+.1f} %)")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.rand(32, 64), torch.randint(10, (32,))
    elastic = Elastic(model, optimizer)
    ordinary = dist.new_group(backend="smddp")

    def plain() -> None:
        functional.cross_entropy(elastic.model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        with elastic.step():
            plain()

    data = torch.zeros(1024)
    compare(
        "4 KiB all_reduce",
        lambda: dist.all_reduce(data, group=ordinary),
        lambda: dist.all_reduce(data),
    )
    compare("DDP step", plain, step)
    elastic.close()


if __name__ == "__main__":
    main()
