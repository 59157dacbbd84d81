"""The settings of `gpu`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.ddp import FULL_MODEL

MIB = 2**20
BUCKET = 25 * MIB
FLAGS, THREADS, GLOO, NONE = "smddp", "smddp, threads", "gloo", "none"
VARIANTS: dict[str, tuple[str, Mapping[str, str]]] = {
    FLAGS: ("smddp", {}),
    THREADS: ("smddp", {"SDP_DEVICE_FLAGS": "0"}),
    GLOO: ("gloo", {}),
}
"""Backend and environment of each variant; a variant has ranks of its own."""
GLOO_DEVICES = ("cpu", "cuda")
"""Types of devices whose tensors gloo takes."""
MOST_ENGINE_THREADS = 4


def slug(variant: str) -> str:
    """Return a variant's name for files."""
    return variant.replace(", ", "_")


@dataclass(frozen=True)
class GpuPlan:
    """What `gpu` measures, and how long.

    Attributes:
        device: The type of the device.
        modules: Modules that the ranks import first.
        ranks: Number of ranks; they take the devices in turn.
        budget_s: Seconds after which no part begins, and the current one ends.
        rounds: Turns of every variant.
        engine_threads: SDP_ENGINE_THREADS of the ranks; 0: from the number of cores.
        sizes: Bytes of a reduced tensor.
        bucket: Bytes where only one size is measured.
        calls: Timed calls in a turn.
        core_threads: The core is measured with these numbers of engine threads.
        check: Arguments of the checks.
        matmul: Side of the matrices, and seconds of a turn.
        model: Arguments of `bert.Bert`: BERT-Medium. 46 % of its gradients are those of the words,
            which the backward pass completes at its very end.
        deep_model: Those of a model of the same size with few words and more layers.
        tokens: Length of a sequence.
        rows: The batch is the smallest power of two that reaches `backward_ms` and fills the
            device, at most `rows`.
        backward_ms: Milliseconds of a backward pass.
        steps: Training steps in a turn.
    """

    device: str = "cuda"
    modules: tuple[str, ...] = ()
    ranks: int = 2
    budget_s: float = 420.0
    rounds: int = 5
    engine_threads: int = 0
    sizes: tuple[int, ...] = (MIB, BUCKET, 100 * MIB)
    bucket: int = BUCKET
    calls: int = 12
    core_threads: tuple[int, ...] = (1, 2, 4, 8)
    check: Mapping[str, Any] = field(
        default_factory=lambda: {
            "small": (1, 1000, MIB),
            "large": (BUCKET,),
            "parts": (1000, MIB // 4),
            "busy": 4096,
            "width": 1024,
        }
    )
    matmul: tuple[int, float] = (4096, 0.5)
    model: Mapping[str, int] = field(default_factory=lambda: dict(FULL_MODEL))
    deep_model: Mapping[str, int] = field(
        default_factory=lambda: {"layers": 12, "width": 512, "words": 5000}
    )
    tokens: int = 128
    rows: int = 128
    backward_ms: float = 40.0
    steps: int = 5

    @property
    def variants(self) -> list[str]:
        """All variants that differ; on CPU tensors the two of smddp do not."""
        absent = {THREADS} if self.device == "cpu" else set()
        absent |= set() if self.device in GLOO_DEVICES else {GLOO}
        return [name for name in VARIANTS if name not in absent]

    @property
    def ours(self) -> list[str]:
        """Those of smddp."""
        return [name for name in self.variants if name != GLOO]

    @property
    def base(self) -> str:
        """The variant whose ranks do what needs no communication."""
        return GLOO if GLOO in self.variants else FLAGS

    @property
    def threads(self) -> int:
        """Return the number of engine threads of a rank."""
        cores = len(os.sched_getaffinity(0))
        return self.engine_threads or max(1, min(MOST_ENGINE_THREADS, cores // self.ranks - 1))


def of_processors() -> dict[str, Any]:
    """Return the settings for tensors on which no GPU computes."""
    plan = GpuPlan()
    return {"check": {**plan.check, "busy": 256}, "matmul": (256, plan.matmul[1]), "rows": 2}


def smoke() -> dict[str, Any]:
    """Return the settings that make every part run in seconds, on a CPU too."""
    check = {"small": (1, 1000), "large": (64 * 1024,), "parts": (1000,), "busy": 64, "width": 64}
    return {
        "rounds": 2,
        "sizes": (64 * 1024, MIB),
        "bucket": MIB,
        "calls": 2,
        "core_threads": (1, 2),
        "check": check,
        "matmul": (64, 0.05),
        "model": {"layers": 1, "width": 64, "words": 5000},
        "deep_model": {"layers": 2, "width": 64, "words": 500},
        "tokens": 8,
        "rows": 1,
        "steps": 2,
    }
