"""An estimator's `distribution`: which library runs the ranks, and with which options.

Errors begin with the text of SageMaker's SDK, for which users search.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sdp_plugins.sagemaker.suggestions import warn_of_unknown

log = logging.getLogger(__name__)

EXAMPLE = 'distribution={"smdistributed": {"dataparallel": {"enabled": True}}}'
PROCESSES = "sagemaker_mpi_num_of_processes_per_host"
_DATA_PARALLEL = "sagemaker_distributed_dataparallel"
_STRATEGIES = ("dataparallel", "modelparallel")
_LOCAL = ("smdistributed", "torch_distributed", "pytorchddp", "mpi")
_OPTIONS = {
    "dataparallel": ("enabled", "custom_mpi_options"),
    "mpi": ("enabled", "processes_per_host", "custom_mpi_options"),
    "torch_distributed": ("enabled",),
    "pytorchddp": ("enabled",),
}
_ELSEWHERE = ("parameter_server", "multi_worker_mirrored_strategy", "pytorchxla")


@dataclass(frozen=True)
class Launch:
    """A parsed `distribution`.

    Attributes:
        distributed: Whether there are ranks; otherwise the script is one process.
        mpi_options: The user's options for mpirun.
        hyperparameters: Hyperparameters that the SDK adds for the container.
    """

    distributed: bool = False
    mpi_options: str = ""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)


def read_distribution(
    distribution: object, instance_type: str, hyperparameters: Mapping[str, Any]
) -> Launch:
    """Check and parse a `distribution`.

    Args:
        distribution: The estimator's argument; None: no ranks, unless a hyperparameter replaces it.
        instance_type: The estimator's argument.
        hyperparameters: The estimator's argument; scripts for SDK 1 request ranks there.

    Raises:
        ValueError: It is invalid, or not supported on this machine.
    """
    if distribution is None:
        return _as_sdk_1(hyperparameters, instance_type)
    if not isinstance(distribution, dict):
        raise ValueError(f"distribution must be a dictionary, not {distribution!r}")
    known = (*_LOCAL, *_ELSEWHERE, "instance_groups")
    if unknown := [name for name in distribution if name not in known]:
        raise ValueError(f"Invalid distribution strategy provided: {unknown[0]}. Hint: {EXAMPLE}")
    if "smdistributed" in distribution:
        _check_smdistributed(distribution["smdistributed"])
    inner = {**distribution, **distribution.get("smdistributed", {})}
    for name in _OPTIONS:
        if isinstance(options := inner.get(name), dict):
            _warn_of_options(name, options)
    enabled = [name for name in distribution if _enabled(distribution, name)]
    if elsewhere := [name for name in enabled if name in _ELSEWHERE]:
        raise ValueError(
            f"{elsewhere[0]} is not supported on this machine. Hint: use {EXAMPLE}, or the SDK."
        )
    if len(enabled) > 1:
        raise ValueError(f"Cannot use more than 1 distribution strategy: {', '.join(enabled)}")
    if not enabled:
        return Launch()
    return _READERS[enabled[0]](distribution[enabled[0]], instance_type)


def _check_smdistributed(given: object) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"smdistributed strategy requires a dictionary. Hint: {EXAMPLE}")
    if len(given) > 1:
        raise ValueError(
            "Cannot use more than 1 smdistributed strategy. \n"
            f"Choose one of the following supported strategies:{[*_STRATEGIES]}"
        )
    for strategy, options in given.items():
        if strategy not in _STRATEGIES:
            raise ValueError(
                f"Invalid smdistributed strategy provided: {strategy} \n"
                f"Supported strategies: {[*_STRATEGIES]}"
            )
        if strategy == "modelparallel":
            raise ValueError(f"modelparallel is not supported on this machine. Hint: {EXAMPLE}")
        if not isinstance(options, dict):
            raise ValueError(f"dataparallel strategy requires a dictionary. Hint: {EXAMPLE}")


def _warn_of_options(name: str, options: Mapping[str, Any]) -> None:
    """Warn of unknown options, which the SDK ignores silently."""
    warn_of_unknown(map(str, options), _OPTIONS[name], name)
    enabled = options.get("enabled")
    if isinstance(enabled, str) and enabled.lower() == "false":
        log.warning(
            "%s: enabled=%r is a string, which counts as True, as in the SDK", name, enabled
        )


def _enabled(distribution: Mapping[str, Any], name: str) -> bool:
    options = distribution[name]
    if name == "smdistributed":
        options = options.get("dataparallel", {})
    return isinstance(options, dict) and bool(options.get("enabled", False))


def _mpi_options(options: Mapping[str, Any]) -> str:
    given = options.get("custom_mpi_options", "")
    if not isinstance(given, str):
        raise ValueError(f"custom_mpi_options must be a string, not {given!r}")
    return given


def _data_parallel(options: Mapping[str, Any], instance_type: str) -> Launch:
    mpi_options = _mpi_options(options["dataparallel"])
    sent = {
        f"{_DATA_PARALLEL}_enabled": True,
        f"{_DATA_PARALLEL}_custom_mpi_options": mpi_options,
        "sagemaker_instance_type": instance_type,
    }
    return Launch(True, mpi_options, sent)


def _mpi(options: Mapping[str, Any], instance_type: str) -> Launch:
    mpi_options = _mpi_options(options)
    sent = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_custom_mpi_options": mpi_options}
    if processes := options.get("processes_per_host"):
        sent[PROCESSES] = processes
    return Launch(True, mpi_options, sent)


def _torch(options: Mapping[str, Any], instance_type: str) -> Launch:
    return Launch(True, "", {"sagemaker_torch_distributed_enabled": True})


def _ddp(options: Mapping[str, Any], instance_type: str) -> Launch:
    sent = {"sagemaker_pytorch_ddp_enabled": True, "sagemaker_instance_type": instance_type}
    return Launch(True, "", sent)


def _as_sdk_1(given: Mapping[str, Any], instance_type: str) -> Launch:
    """Read the hyperparameters that later SDKs make from `distribution`."""
    if not given.get(f"{_DATA_PARALLEL}_enabled"):
        return Launch()
    options = {"custom_mpi_options": given.get(f"{_DATA_PARALLEL}_custom_mpi_options", "")}
    return _data_parallel({"dataparallel": options}, instance_type)


_READERS = {
    "smdistributed": _data_parallel,
    "mpi": _mpi,
    "torch_distributed": _torch,
    "pytorchddp": _ddp,
}
