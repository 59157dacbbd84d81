"""An estimator's `distribution`: which library runs the ranks, and with which options.

Errors begin with the text of SageMaker's SDK, for which users search.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sdp_plugins.sagemaker.arguments import warn_of_unknown

log = logging.getLogger(__name__)

EXAMPLE = 'distribution={"smdistributed": {"dataparallel": {"enabled": True}}}'
PROCESSES = "sagemaker_mpi_num_of_processes_per_host"
MPI_OPTIONS = "custom_mpi_options"
_DATA_PARALLEL = "sagemaker_distributed_dataparallel"
_STRATEGIES = ("dataparallel", "modelparallel")
_PREFIXES = {
    "smdistributed": _DATA_PARALLEL,
    "torch_distributed": "sagemaker_torch_distributed",
    "pytorchddp": "sagemaker_pytorch_ddp",
    "mpi": "sagemaker_mpi",
}
"""Beginnings of the hyperparameters of each distribution."""
_OPTIONS = {
    "smdistributed": ("enabled", MPI_OPTIONS),  # of its dataparallel
    "mpi": ("enabled", "processes_per_host", MPI_OPTIONS),
    "torch_distributed": ("enabled",),
    "pytorchddp": ("enabled",),
}
_ELSEWHERE = ("parameter_server", "multi_worker_mirrored_strategy", "pytorchxla")


def added_hyperparameters(
    distribution: object, instance_type: str, hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Check a `distribution`, and return the hyperparameters that the SDK makes from it.

    Args:
        distribution: The estimator's argument; None: no ranks, unless a hyperparameter replaces it.
        instance_type: The estimator's argument.
        hyperparameters: The estimator's argument; scripts for SDK 1 request ranks there.

    Returns:
        Nothing (an empty dict) if the script is one process, without ranks.

    Raises:
        ValueError: It is invalid, or not supported on this machine.
    """
    if distribution is None:
        if not hyperparameters.get(f"{_DATA_PARALLEL}_enabled"):
            return {}
        mpi_options = hyperparameters.get(f"{_DATA_PARALLEL}_{MPI_OPTIONS}", "")
        return _added("smdistributed", {MPI_OPTIONS: mpi_options}, instance_type)
    if not isinstance(distribution, dict):
        raise ValueError(f"distribution must be a dictionary, not {distribution!r}")
    known = (*_PREFIXES, *_ELSEWHERE, "instance_groups")
    if unknown := [name for name in distribution if name not in known]:
        raise ValueError(f"Invalid distribution strategy provided: {unknown[0]}. Hint: {EXAMPLE}")
    given = {name: options for name, options in distribution.items() if isinstance(options, dict)}
    if "smdistributed" in distribution:
        _check_smdistributed(distribution["smdistributed"])
        given["smdistributed"] = distribution["smdistributed"].get("dataparallel", {})
    for name in _OPTIONS:
        if name in given:
            _warn_of_options(name, given[name])
    enabled = [name for name, options in given.items() if options.get("enabled", False)]
    if elsewhere := [name for name in enabled if name in _ELSEWHERE]:
        raise ValueError(
            f"{elsewhere[0]} is not supported on this machine. Hint: use {EXAMPLE}, or the SDK."
        )
    if len(enabled) > 1:
        raise ValueError(f"Cannot use more than 1 distribution strategy: {', '.join(enabled)}")
    return _added(enabled[0], given[enabled[0]], instance_type) if enabled else {}


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
    shown = "dataparallel" if name == "smdistributed" else name
    warn_of_unknown(map(str, options), _OPTIONS[name], shown)
    enabled = options.get("enabled")
    if isinstance(enabled, str) and enabled.lower() == "false":
        log.warning(
            "%s: enabled=%r is a string, which counts as True, as in the SDK", shown, enabled
        )


def _added(name: str, options: Mapping[str, Any], instance_type: str) -> dict[str, Any]:
    """The hyperparameters of an enabled distribution."""
    prefix = _PREFIXES[name]
    found: dict[str, Any] = {f"{prefix}_enabled": True}
    if MPI_OPTIONS in _OPTIONS[name]:
        found[f"{prefix}_{MPI_OPTIONS}"] = mpi_options = options.get(MPI_OPTIONS, "")
        if not isinstance(mpi_options, str):
            raise ValueError(f"{MPI_OPTIONS} must be a string, not {mpi_options!r}")
    if options.get("processes_per_host") and name == "mpi":
        found[PROCESSES] = options["processes_per_host"]
    if name in ("smdistributed", "pytorchddp"):
        found["sagemaker_instance_type"] = instance_type
    return found


def variables_for_mpirun(added: Mapping[str, Any]) -> dict[str, str]:
    """The variables of `-x NAME=VALUE` among the hyperparameters that a distribution has added.

    Other options have no effect, without mpirun.
    """
    options = next((value for name, value in added.items() if name.endswith(MPI_OPTIONS)), "")
    words, left = options.split(), []
    found: dict[str, str] = {}
    while words:
        word = words.pop(0)
        if word == "-x" and words:
            name, _, value = words.pop(0).partition("=")
            found |= {name: value} if value else {}
        else:
            left.append(word)
    if left:
        log.info("custom_mpi_options that have no effect on this machine: %s", " ".join(left))
    return found
