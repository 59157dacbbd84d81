"""Which of PyTorch's tests gloo passes, as `gloo_passes.txt` keeps it, and which use a device.

for n in 2 3; do python -m tests.torch.suite.run --backend gloo --ranks $n --json gloo$n.json; done
python -m tests.torch.suite.listing gloo2.json gloo3.json

prints the list of the torch that is installed. The file has those of all versions: the tests are
the same, but for lines that say `since` or `before`.

Tests that take gloo longer than run.LIMIT_S are not in it. Of those that may pass this is
test_ddp_uneven_inputs alone, until 2.15 made its images smaller.

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
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

HERE = Path(__file__).parent
RANKS = (2, 3)
LINE = re.compile(r"(?P<test>\w+)(?P<ranks>( \d)+)( (?P<when>since|before) (?P<version>[\d.]+))?")


def read(name: str) -> Iterator[tuple[str, int]]:
    """Tests of a list that hold for this version of torch, each with a number of ranks."""
    for line in (HERE / name).read_text().splitlines():
        if (found := LINE.match(line)) and holds(found["when"], found["version"]):
            yield from ((found["test"], int(n)) for n in found["ranks"].split())


def holds(when: str | None, version: str) -> bool:
    """Whether a line that says `since` or `before` a version is about this one."""
    return when is None or (when == "since") == (torch.__version__ >= version)


def write(found: dict[int, dict[str, str]], what: str) -> None:
    """Print the list: what became of each test, by number of ranks."""
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
