"""PyTorch's own tests of torch.distributed: every one that gloo passes, smddp passes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.torch.suite import listing

REFUSED = "monitored_barrier is only implemented for GLOO backend"
LIMIT_S = 280  # for one part, most of it on a machine that does something else, too
PARTS = 10
EXCEPTIONS = set(listing.read("exceptions.txt"))
LISTED = list(listing.read("gloo_passes.txt"))

pytestmark = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != listing.torch_version(),
    reason=f"the list of what gloo passes is of torch {listing.torch_version()}",
)


@pytest.mark.parametrize("part", range(PARTS))
def test_what_gloo_passes(tmp_path: Path, part: int) -> None:
    """Those of two ranks run beside those of three."""
    names = {n: [t for t, ranks in LISTED if ranks == n][part::PARTS] for n in listing.RANKS}
    with ExitStack() as stack:
        jobs = [stack.enter_context(start(n, tests, tmp_path)) for n, tests in names.items()]
        for job in jobs:
            stack.callback(job.kill)
        for job in jobs:
            job.wait(LIMIT_S)
    wrong = [
        f"{test} on {n} ranks: {text}"
        for n in listing.RANKS
        for test, text in json.loads(result_of(n, tmp_path).read_text()).items()
        if not (REFUSED in text if (test, n) in EXCEPTIONS else text == "passed")
    ]
    assert not wrong, "\n".join(wrong)


def start(ranks: int, tests: list[str], folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.torch.suite.run", "--ranks", str(ranks)]
    with (folder / f"{ranks}.log").open("w") as log:
        return subprocess.Popen(
            [*command, "--json", str(result_of(ranks, folder)), *tests], stdout=log, stderr=log
        )


def result_of(ranks: int, folder: Path) -> Path:
    return folder / f"{ranks}.json"
