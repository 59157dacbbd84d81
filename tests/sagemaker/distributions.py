"""Distributions that SageMaker's SDK refuses, and so does the estimator of this machine."""

from __future__ import annotations

from typing import Any

DATA_PARALLEL: dict[str, Any] = {"smdistributed": {"dataparallel": {"enabled": True}}}
BAD: dict[str, Any] = {
    "no dictionary": {"smdistributed": True},
    "two strategies": {
        "smdistributed": {"dataparallel": {"enabled": True}, "modelparallel": {"enabled": True}}
    },
    "misspelt": {"smdistributed": {"dataparalel": {"enabled": True}}},
}
