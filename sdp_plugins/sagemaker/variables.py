"""The variables that SageMaker's toolkit sets for a script."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sdp_plugins.sagemaker import hyperparameters
from sdp_plugins.sagemaker.container import GROUP, INTERFACE, Container

LOG_LEVEL = 20
# Facts that SM_TRAINING_ENV lacks, or has under other names.
_ELSEWHERE = {"hps", "user_args", "framework_params", "channels"}


def variables(container: Container) -> dict[str, str]:
    """The variables of all ranks of a container; folders are this machine's."""
    facts = _place(container) | _folders(container) | _job(container)
    channels = {f"channel_{channel}": container.data / channel for channel in container.channels}
    parameters = {f"hp_{key}": value for key, value in facts["hps"].items()}
    found = {**facts, **channels, **parameters, "training_env": _training_env(container, facts)}
    return {f"SM_{name.upper()}": _text(value) for name, value in found.items()} | {
        "TRAINING_JOB_NAME": str(container.given["sagemaker_job_name"])
    }


def _place(container: Container) -> dict[str, Any]:
    hosts = [*container.hosts]
    resources = container.resources()
    return {
        "hosts": hosts,
        "current_host": container.host,
        "current_instance_type": container.instance_type,
        "current_instance_group": GROUP,
        "current_instance_group_hosts": hosts,
        "instance_groups": [GROUP],
        "instance_groups_dict": {GROUP: resources["instance_groups"][0]},
        "distribution_instance_groups": [GROUP],
        "is_hetero": False,
        "network_interface_name": INTERFACE,
        "num_cpus": len(os.sched_getaffinity(0)),
        "num_gpus": container.gpus,
        "num_neurons": 0,
        "resource_config": resources,
    }


def _folders(container: Container) -> dict[str, Any]:
    return {
        "input_dir": container.data.parent,
        "input_config_dir": container.data.parent / "config",
        "model_dir": container.model,
        "module_dir": container.code,
        "output_dir": container.output,
        "output_data_dir": container.output / "data",
        "output_intermediate_dir": container.output / "intermediate",
    }


def _job(container: Container) -> dict[str, Any]:
    script = hyperparameters.of_the_script(container.given)
    return {
        "channels": sorted(container.channels),
        "hps": script,
        "user_args": hyperparameters.arguments(script),
        "user_entry_point": container.entry_point,
        "module_name": Path(container.entry_point).stem,
        "framework_params": hyperparameters.of_the_framework(container.given),
        "framework_module": container.framework,
        "input_data_config": container.inputs(),
        "log_level": LOG_LEVEL,
    }


def _training_env(container: Container, facts: dict[str, Any]) -> dict[str, Any]:
    folders = {channel: container.data / channel for channel in container.channels}
    return {
        **{key: value for key, value in facts.items() if key not in _ELSEWHERE},
        "additional_framework_parameters": facts["framework_params"],
        "channel_input_dirs": folders,
        "distribution_hosts": facts["hosts"],
        "hyperparameters": facts["hps"],
        "is_master": container.host == container.hosts[0],
        "job_name": container.given["sagemaker_job_name"],
        "master_hostname": container.hosts[0],
    }


def _text(value: Any) -> str:
    if isinstance(value, (str, Path)):
        return str(value)
    if value is None:
        return ""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
