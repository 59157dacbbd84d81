"""PyTorch's own tests of torch.distributed, which ship in its wheel, over gloo or smddp.

    python -m tests.torch.suite.run --backend smddp --ranks 2 [test_all_reduce_sum ...]

Each test's ranks are forked from this process. To tests that do one thing or another by the
backend's name, and to their decorators, it is gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

LIMIT_S = 60


class AsGloo(str):
    """A backend's name that is gloo's, too, to tests that do one thing or another by it."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class Outcomes(unittest.TestResult):
    """What became of each test: ``passed``, ``skipped``, or its error's text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def _note(self, test: Any, outcome: str) -> None:
        name = test._testMethodName
        if self.found.get(name, "passed") in ("passed", outcome):  # the first error is the cause
            self.found[name] = outcome
            print(f"{name}: {outcome}", file=sys.stderr, flush=True)

    def addSuccess(self, test: Any) -> None:
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, "skipped")

    def addError(self, test: Any, err: Any) -> None:
        self._note(test, self._exc_info_to_string(err, test))

    def addFailure(self, test: Any, err: Any) -> None:
        self._note(test, self._exc_info_to_string(err, test))


def suite(backend: str, ranks: int, folder: str, limit_s: int) -> type[unittest.TestCase]:
    """torch's test class over a backend. Once in a process: its module reads the environment."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(ranks),
        INIT_METHOD="env://",
        TEMP_DIR=folder,
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(limit_s),
    )
    import torch

    from tests.torch.suite import on_cpu

    torch.set_num_threads(1)
    on_cpu.lift_gates()
    from torch.testing._internal.common_distributed import TIMEOUT_OVERRIDE
    from torch.testing._internal.distributed import distributed_test as torch_tests

    TIMEOUT_OVERRIDE.update((name, max(limit_s, own)) for name, own in TIMEOUT_OVERRIDE.items())
    torch_tests.BACKEND = AsGloo(backend)
    for supported in (
        torch_tests.PROFILING_SUPPORTED_BACKENDS,
        torch_tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        supported.append(backend)

    class TestDistBackend(torch_tests.TestDistBackend, torch_tests.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            on_cpu.map_cuda()
            super()._run(*args, **kwargs)

    return TestDistBackend


def run(backend: str, ranks: int, names: list[str], limit_s: int = LIMIT_S) -> dict[str, str]:
    """What becomes of the tests with these names, or of all."""
    with tempfile.TemporaryDirectory() as folder:
        case = suite(backend, ranks, folder, limit_s)
        outcomes = Outcomes()
        for name in names or unittest.defaultTestLoader.getTestCaseNames(case):
            case(name).run(outcomes)
    return outcomes.found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="PyTorch's own tests of torch.distributed.")
    parser.add_argument("--backend", default="smddp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="seconds for each test")
    parser.add_argument("--json", type=Path, help="where to write what became of each test")
    parser.add_argument("tests", nargs="*", help="names of tests; all if none is given")
    args = parser.parse_args()
    found = run(args.backend, args.ranks, args.tests, args.limit)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    passed = sum(outcome == "passed" for outcome in found.values())
    skipped = sum(outcome == "skipped" for outcome in found.values())
    failed = len(found) - passed - skipped
    print(
        f"{args.backend}, {args.ranks} ranks: {passed} passed, {skipped} skipped, {failed} failed"
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
