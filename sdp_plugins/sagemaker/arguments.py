"""The names that SageMaker's estimators take, and warnings of others."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Collection, Iterable

log = logging.getLogger(__name__)

# Arguments of the SDK's estimators without an effect on this machine.
WITHOUT_MEANING = {
    *("role", "framework_version", "py_version", "image_uri", "sagemaker_session", "volume_size"),
    *("max_run", "max_wait", "use_spot_instances", "keep_alive_period_in_seconds", "tags"),
    *("enable_sagemaker_metrics", "container_log_level", "code_location", "training_plan"),
    *("subnets", "security_group_ids", "encrypt_inter_container_traffic", "output_kms_key"),
    *("volume_kms_key", "input_mode", "model_uri", "model_channel_name", "checkpoint_s3_uri"),
    *("checkpoint_local_path", "debugger_hook_config", "profiler_config", "disable_profiler"),
    *("rules", "git_config", "tensorboard_output_config", "enable_network_isolation"),
    *("max_retry_attempts", "enable_infra_check", "enable_remote_debug", "compiler_config"),
    *("enable_session_tag_chaining", "disable_output_compression", "instance_placement_config"),
    *("training_repository_access_mode", "training_repository_credentials_provider_arn"),
}
OF_FIT = {"inputs", "wait", "logs", "job_name", "experiment_config"}


def known_to(estimator: type) -> set[str]:
    """The names of all arguments of an estimator's class."""
    found = set(WITHOUT_MEANING)
    for kind in estimator.__mro__[:-1]:
        found |= {*inspect.signature(kind).parameters}
    return found - {"arguments", "others"}


def warn_of_unknown(given: Iterable[str], known: Collection[str], where: str = "") -> None:
    """Warn of unknown names, which are ignored, and suggest the closest known name."""
    for name in sorted(set(given) - set(known)):
        meant = difflib.get_close_matches(name, known, 1, cutoff=0.75)
        hint = f". Hint: did you mean {meant[0]}?" if meant else ""
        log.warning("%s%s is unknown and ignored%s", where and f"{where}: ", name, hint)
