"""The models that `scaling` trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.nodes import Layout

# Eight ranks on two cores take a second for a step of these, two ranks a quarter of a second.
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"rows": 4, "tokens": 64, "model": {"layers": 6, "width": 320, "words": 4096}},
    "detection": {
        "rows": 4,
        "side": 128,
        "model": {"width": 32, "blocks": [3, 4, 6, 3], "channels": 64},
    },
}

WORKLOADS = {
    "bert": "benchmarks.bert:Workload",
    "detection": "benchmarks.scaling.detection:Workload",
}


@dataclass(frozen=True)
class ScalingPlan:
    """The settings of the training in one layout.

    Attributes:
        model: One of MODELS.
        setting: The settings of that model's workload.
        layout: Number of nodes, and of ranks on each.
        gbit: Speed of the links; None: the speed at which gloo's communication has the wanted
            share.
        rounds: Turns of every variant.
        steps: Timed steps in a turn; one untimed step precedes them.
    """

    model: str
    setting: Mapping[str, Any]
    layout: Layout
    gbit: float | None = None
    rounds: int = 5
    steps: int = 3


def known_model(name: str) -> str:
    """Validate the name of a model.

    Raises:
        ValueError: There is no such model.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(MODELS)}")
    return name
