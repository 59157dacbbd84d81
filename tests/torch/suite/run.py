"""PyTorch's own tests of torch.distributed, which ship in its wheel, over gloo or smddp.

    python -m tests.torch.suite.run --backend smddp --ranks 2 [test_all_reduce_sum ...]
    python -m tests.torch.suite.run --device simdev --posing-as nccl [test_all_gather_cuda ...]

Each test's ranks are forked from this process. To tests that do one thing or another by the
backend's name, and to their decorators, it is gloo, or nccl. What they do on CUDA devices is done
on CPUs, or on the simulated accelerator.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import time
import unittest
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 60
TORCHS_POLL_S, POLL_S = 0.1, 0.01
ON_DEVICE = "on_device"  # a file that a rank makes when it communicates tensors of the device
CRASH = "crash"  # begins the names of files with the stacks of ranks that a signal has ended
PASSED = ("passed", "passed on CPUs")


class Posing(str):
    """A backend's name that is another's, too, to tests that do one thing or another by it."""

    other: str
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == self.other or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class Outcomes(unittest.TestResult):
    """What became of each test: one of `PASSED`, ``skipped``, or its error's text.

    Args:
        on_device: A file that is there if a test has communicated tensors of a device; None where
            there is no device.
    """

    def __init__(self, on_device: Path | None = None) -> None:
        super().__init__()
        self.on_device = on_device
        self.found: dict[str, str] = {}

    def _note(self, test: Any, outcome: str) -> None:
        name = test._testMethodName
        if self.found.get(name, "passed") in ("passed", outcome):  # the first error is the cause
            self.found[name] = outcome
            print(f"{name}: {outcome}", file=sys.stderr, flush=True)

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        if self.on_device is not None:
            self.on_device.unlink(missing_ok=True)

    def addSuccess(self, test: Any) -> None:
        on_cpus = self.on_device is not None and not self.on_device.exists()
        self._note(test, PASSED[on_cpus])

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, "skipped")

    def addError(self, test: Any, err: Any) -> None:
        self._note(test, self._exc_info_to_string(err, test))

    def addFailure(self, test: Any, err: Any) -> None:
        self._note(test, self._exc_info_to_string(err, test))


class QuickPolls:
    """The module `time`, for torch's tests: they poll ten times a second, three times in each."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(POLL_S if seconds == TORCHS_POLL_S else seconds)


@dataclass
class Job:
    """What tests run over.

    Attributes:
        backend: Its name.
        ranks: Their number.
        device: What every CUDA device is: `cpu` or `simdev`.
        posing_as: Whose name the backend bears to the tests.
        limit_s: Seconds for each test.
    """

    backend: str = "smddp"
    ranks: int = 2
    device: str = "cpu"
    posing_as: str = "gloo"
    limit_s: int = LIMIT_S

    @property
    def name(self) -> Posing:
        """The backend's name, as tests know it."""
        name = Posing(self.backend)
        name.other = self.posing_as
        return name


def suite(job: Job, folder: str) -> type[unittest.TestCase]:
    """torch's test class for a job. Once in a process: its module reads the environment."""
    os.environ.update(
        BACKEND=job.posing_as,
        WORLD_SIZE=str(job.ranks),
        INIT_METHOD="env://",
        TEMP_DIR=folder,
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(job.limit_s),
    )
    import torch

    from tests.torch.suite import on_cpu, on_device

    torch.set_num_threads(1)
    on_cpu.lift_gates()
    if job.device != "cpu":
        on_device.load()
    from torch.testing._internal import common_distributed as common
    from torch.testing._internal.distributed import distributed_test as torch_tests

    common.time = torch_tests.time = QuickPolls()
    limits = common.TIMEOUT_OVERRIDE
    limits.update((name, max(job.limit_s, own)) for name, own in limits.items())
    torch_tests.BACKEND = job.name
    for supported in (
        torch_tests.PROFILING_SUPPORTED_BACKENDS,
        torch_tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        supported.append(job.backend)

    class TestDistBackend(torch_tests.TestDistBackend, torch_tests.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _check_return_codes(self, *args: Any) -> None:
            try:
                super()._check_return_codes(*args)
            except Exception as error:  # it says nothing of a rank that a signal has ended
                codes = [process.exitcode for process in self.processes]
                crashes = [path.read_text() for path in sorted(Path(folder).glob(f"{CRASH}*"))]
                text = "\n".join((f"{error}\nexit codes of the ranks: {codes}", *crashes))
                raise RuntimeError(text) from None

        @classmethod
        def _run(cls, rank: int, test: str, *args: Any, **kwargs: Any) -> None:
            faulthandler.enable((Path(folder) / f"{CRASH}{rank}").open("w"))
            # Renews torch's pool of threads, which is not safe if threads do it at the same time.
            torch.set_num_threads(1)
            if job.device == "cpu":
                on_cpu.map_cuda()
            else:
                on_device.map_cuda(test, Path(folder) / ON_DEVICE)
            super()._run(rank, test, *args, **kwargs)

    return TestDistBackend


def run(job: Job, names: list[str]) -> dict[str, str]:
    """What becomes of the tests with these names, or of all."""
    with tempfile.TemporaryDirectory() as folder:
        case = suite(job, folder)
        outcomes = Outcomes(Path(folder) / ON_DEVICE if job.device != "cpu" else None)
        for name in names or unittest.defaultTestLoader.getTestCaseNames(case):
            case(name).run(outcomes)
    return outcomes.found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="PyTorch's own tests of torch.distributed.")
    parser.add_argument("--backend", default="smddp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "simdev"], default="cpu")
    parser.add_argument("--posing-as", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="seconds for each test")
    parser.add_argument("--json", type=Path, help="where to write what became of each test")
    parser.add_argument("tests", nargs="*", help="names of tests; all if none is given")
    args = parser.parse_args()
    job = Job(args.backend, args.ranks, args.device, args.posing_as, args.limit)
    found = run(job, args.tests)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    passed = sum(outcome in PASSED for outcome in found.values())
    skipped = sum(outcome == "skipped" for outcome in found.values())
    failed = len(found) - passed - skipped
    print(
        f"{args.backend}, {args.ranks} ranks: {passed} passed, {skipped} skipped, {failed} failed"
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
