"""PyTorch's own tests of torch.distributed: every one that gloo passes, smddp passes.

Those for GPUs run on CPUs and, as for NCCL, on the simulated accelerator.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.ranks import job_environment, run_ranks
from tests.torch.suite import listing
from tests.torch.suite.run import Job, run

ON_DEVICE = dict(reversed(list(listing.read("device_passes.txt"))))
DEVICE_PARTS = 4
LIMIT_S = 350  # for one part, most of it on a machine that does something else, too
PARTS, LONG_PARTS = 3, 5
EXCEPTIONS = set(listing.read("exceptions.txt"))
REFUSAL = (
    "did not arrive"
    if torch.__version__ >= "2.14"
    else "monitored_barrier is only implemented for GLOO backend"
)
LISTED = list(listing.read("gloo_passes.txt"))
FEWEST = dict(reversed(LISTED))
"""On how many ranks each test runs by default: three only if it needs three."""
SLOW = {"test_ddp_compile_static_graph", "test_ddp_uneven_inputs"}
"""Each takes as long as 50 others; test_ddp.py has a compiled model and uneven inputs, too."""
DEFAULT = {n: [t for t, ranks in FEWEST.items() if ranks == n and t not in SLOW] for n in (2, 3)}
LONG = {2: sorted(SLOW & {*FEWEST}), 3: [test for test, ranks in LISTED if ranks > FEWEST[test]]}

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def run_suite(rank: int, world: int, job: Job, tests: list[str], flags: bool) -> dict[str, str]:
    """In a process that starts a job's ranks, and is none itself."""
    for name in ("RANK", "LOCAL_RANK", *job_environment(1)):
        del os.environ[name]
    os.environ["SDP_DEVICE_FLAGS"] = str(int(flags))
    return run(job, tests)


def outcomes(job: Job, tests: list[str], flags: bool = True) -> dict[str, str]:
    """What becomes of tests, in a process of their own."""
    [found] = run_ranks(1, run_suite, job, tests, flags, timeout_s=LIMIT_S)
    return dict(found)


@pytest.mark.parametrize(
    ("ranks", "tests"),
    [
        *(pytest.param(2, DEFAULT[2][i::PARTS], id=f"2-{i}") for i in range(PARTS)),
        pytest.param(3, DEFAULT[3], id="3"),
        pytest.param(2, LONG[2], id="2-long", marks=pytest.mark.long),
        *(
            pytest.param(3, LONG[3][i::LONG_PARTS], id=f"3-long-{i}", marks=pytest.mark.long)
            for i in range(LONG_PARTS)
        ),
    ],
)
def test_what_gloo_passes(ranks: int, tests: list[str]) -> None:
    wrong = [
        f"{test} on {ranks} ranks: {text}"
        for test, text in outcomes(Job(ranks=ranks), tests).items()
        if not (REFUSAL in text if (test, ranks) in EXCEPTIONS else text == "passed")
    ]
    assert not wrong, "\n".join(wrong)


def test_all_of_the_list_runs() -> None:
    run = [(test, n) for n in listing.RANKS for test in DEFAULT[n] + LONG[n]]
    assert sorted(run) == sorted(LISTED)


@pytest.mark.parametrize("flags", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("ranks", "part"),
    [
        (2, 0),
        *(pytest.param(2, part, marks=pytest.mark.long) for part in range(1, DEVICE_PARTS)),
        (3, 0),
    ],
)
def test_on_a_device(ranks: int, part: int, flags: bool) -> None:
    tests = [t for t, n in ON_DEVICE.items() if n == ranks and not (flags and t in SLOW)]
    tests = tests[part :: DEVICE_PARTS if ranks == 2 else 1]
    found = outcomes(Job(ranks=ranks, device="simdev", posing_as="nccl"), tests, flags)
    wrong = [f"{test}: {text}" for test, text in found.items() if text != "passed"]
    assert len(found) == len(tests)
    assert not wrong, "\n".join(wrong)
