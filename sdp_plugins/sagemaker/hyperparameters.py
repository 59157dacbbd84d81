"""Hyperparameters in the forms that SageMaker's toolkit passes to a script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_PREFIX = "sagemaker_"
# For the toolkit, not for the script or the framework.
_OF_THE_JOB = {
    f"{_PREFIX}{name}"
    for name in ("program", "submit_directory", "container_log_level", "job_name", "region")
}


def decoded(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert hyperparameters as their transport in JSON does.

    Raises:
        ValueError: JSON cannot represent a value.
    """
    try:
        return {str(key): json.loads(json.dumps(value)) for key, value in given.items()}
    except TypeError as error:
        raise ValueError(f"hyperparameters must be JSON values: {error}") from None


def of_the_script(given: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that are arguments of the script."""
    return {key: value for key, value in given.items() if not key.startswith(_PREFIX)}


def of_the_framework(given: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that SageMaker's toolkit for a framework reads."""
    return {
        key: value
        for key, value in given.items()
        if key.startswith(_PREFIX) and key not in _OF_THE_JOB
    }


def arguments(given: Mapping[str, Any]) -> list[str]:
    """The script's command line: sorted, ``--name value``, ``-n value`` for names of one letter."""
    found = []
    for key in sorted(given):
        found += [f"--{key}" if len(key) > 1 else f"-{key}", _text(given[key])]
    return found


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in sorted(value.items()))
    return "" if value is None else str(value)
