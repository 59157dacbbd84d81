"""Which of PyTorch's tests gloo passes, as `gloo_passes.txt` keeps it, and which use a device.

for n in 2 3; do python -m tests.torch.suite.run --backend gloo --ranks $n --json gloo$n.json; done
python -m tests.torch.suite.listing gloo2.json gloo3.json > tests/torch/suite/gloo_passes.txt

Tests that take gloo longer than run.LIMIT_S are not in it. Of those that may pass this is
test_ddp_uneven_inputs alone, whose large convolutions take CPUs more than seven minutes, over any
backend.

`device_passes.txt` has those that smddp passes posing as nccl, and in which it communicates tensors
of the simulated accelerator. Among them are all such tests that run with gloo. Those that use the
device but do not pass are in `device_exceptions.txt`, with the reasons.

for n in 2 3; do
    python -m tests.torch.suite.run --device simdev --posing-as nccl --ranks $n --json nccl$n.json
done
python -m tests.torch.suite.listing --device nccl2.json nccl3.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
RANKS = (2, 3)


def read(name: str) -> Iterator[tuple[str, int]]:
    """Tests of a list, each with a number of ranks."""
    for line in (HERE / name).read_text().splitlines():
        test, *ranks = line.partition("#")[0].split() or ["# a remark"]
        yield from ((test, int(n)) for n in ranks)


def torch_version() -> str:
    """The version of torch that the lists are of."""
    return (HERE / "gloo_passes.txt").read_text().split(maxsplit=3)[2]


def write(found: dict[int, dict[str, str]], what: str) -> None:
    """Print the list: what became of each test, by number of ranks."""
    import torch

    print(f"# torch {torch.__version__.partition('+')[0]} : what {what} passes, at how many ranks")
    for test in sorted({test for outcomes in found.values() for test in outcomes}):
        ranks = [n for n, outcomes in found.items() if outcomes.get(test) == "passed"]
        if ranks:
            print(test, *ranks)


if __name__ == "__main__":
    *flag, two, three = sys.argv[1:]
    outcomes = {
        n: json.loads(Path(f).read_text()) for n, f in zip(RANKS, (two, three), strict=True)
    }
    write(outcomes, "smddp on a device" if flag else "gloo")
