"""Jobs of one, two or three ranks on the same three processes.

To start a process with TensorFlow or JAX takes longer than most cases, so there are no more of them
than the largest job needs. The process after a job's ranks can do the job alone, at the same time.

    @on_ranks(2, BACKENDS)
    def test_evaluation(rank, world, tmp_path):     # runs on 2 ranks of each backend
        ...
        assert loss < 1                             # holds on each rank
        return loss                                 # is the same on all ranks
"""

from __future__ import annotations

import inspect
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

from sdp_plugins.launch.job_environment import shared_malloc
from tests.ranks import RankPool, Ranks

BACKENDS = ("tensorflow", "torch", "jax")
PROCESSES = 3
LIMIT_S = 280.0  # of a job: below the time that a test has


def environment(backend: str, fast_compiler: bool = True) -> dict[str, str]:
    """A rank's, as `sdp run` makes it, with one thread for each of its framework's pools.

    XLA optimizes nothing: most of the time of JAX's cases would be its compiler's. Its faster
    compiler gives NaN for some models in a single process (jax 0.10.2, `make stress`, case 2).
    """
    xla = ["--xla_cpu_multi_thread_eigen=false", "--xla_backend_optimization_level=0"]
    if (
        fast_compiler and backend == "jax" and not version("jax").startswith("0.5.")
    ):  # ends if it knows no flag
        xla.append("--xla_cpu_use_fusion_emitters=false")
    return {
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "XLA_FLAGS": " ".join(xla),
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "-1",
        **shared_malloc(os.environ),
    }


Function = Callable[..., Any] | str
"""A function of a module, or its name as `module:function` where that must not be imported here."""


@dataclass
class FirstRanks:
    """The first n processes of a pool; and what a job's environment has besides."""

    pool: RankPool
    n: int
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, function: Function, *args: Any, timeout_s: float = LIMIT_S) -> list[Any]:
        """Run `function(rank, world, *args)` on n ranks; their results in rank order."""
        return self._run(self.n, function, args, timeout_s)

    def run_beside_one(
        self, function: Function, *args: Any, timeout_s: float = LIMIT_S
    ) -> list[Any]:
        """The same, and behind the ranks' results that of one process alone."""
        return self._run(self.n + 1, function, args, timeout_s)

    @contextmanager
    def start(self, function: Function, *args: Any) -> Iterator[Ranks]:
        """Start a job on n ranks that may lose some, which are then replaced."""
        with self.pool.start(part, *self._part(self.n, function, args)) as ranks:
            yield ranks
            ranks.outcomes()  # those that have ended are kept

    def _run(
        self, busy: int, function: Function, args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        results = self.pool.run(part, *self._part(busy, function, args), timeout_s=timeout_s)
        return results[:busy]

    def _part(self, busy: int, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        assert busy <= self.pool.n
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        env = {**self.environment, "WORLD_SIZE": str(self.n), "LOCAL_WORLD_SIZE": str(self.n)}
        return self.n, busy, env, function, args


def part(
    rank: int,
    world: int,
    n: int,
    busy: int,
    environment: dict[str, str],
    name: str,
    args: tuple[Any, ...],
) -> Any:
    """In a process of the pool: its part of a job of n ranks."""
    if rank >= busy:
        return None
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environment.items():
            patch.setenv(variable, value)
        function = pkgutil.resolve_name(name)
        function = getattr(function, "on_rank", function)
        return function(*((rank, n) if rank < n else (0, 1)), *args)


def first_ranks(rank_pools: Any, backend: str, n: int) -> FirstRanks:
    """n kept ranks with Keras on a backend."""
    return FirstRanks(processes(rank_pools, backend), n)


def processes(rank_pools: Any, backend: str) -> RankPool:
    """The kept processes of a backend."""
    return rank_pools.pool(PROCESSES, env=environment(backend), module="sdp_plugins.keras")


def on_ranks(
    n: int, backends: Sequence[str] = ("torch",), environment: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Have a test run on n kept ranks with Keras on each of some backends.

    It is called as `test(rank, world, *arguments)`, where arguments are fixtures and parameters, as
    of any test, that can be pickled. What it asserts must hold on each rank, and what it returns
    must be the same on all.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(function, follow_wrapped=False)
        arguments = list(signature.parameters.values())[2:]

        @pytest.mark.parametrize("backend", backends)
        @wraps(function)
        def test(rank_pools: Any, backend: str, **values: Any) -> None:
            ranks = first_ranks(rank_pools, backend, n)
            ranks.environment = environment or {}
            first, *others = ranks.run(test, *(values[each.name] for each in arguments))
            for other in others:
                assert_same(other, first, 0.0, "")

        own = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("rank_pools", "backend")
        ]
        test.__signature__ = signature.replace(parameters=[*own, *arguments])  # type: ignore[attr-defined]
        test.on_rank = function  # type: ignore[attr-defined]
        return test

    return decorate


def assert_same(one: Any, other: Any, tolerance: float, where: str) -> None:
    """Compare results of jobs, number by number."""
    if isinstance(one, dict):
        assert sorted(one) == sorted(other), where
        for key in one:
            assert_same(one[key], other[key], tolerance, f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, tolerance, f"{where}[{index}]")
    elif one is None or isinstance(one, str):
        assert one == other, where
    else:
        np.testing.assert_allclose(
            np.asarray(one, np.float64),
            np.asarray(other, np.float64),
            rtol=tolerance,
            atol=tolerance,
            err_msg=where,
        )
