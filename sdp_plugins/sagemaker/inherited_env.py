"""The variables that a job inherits from this process, without those of other jobs."""

from __future__ import annotations

from collections.abc import Mapping

from sdp_plugins.launch.clean_environment import without_place

# SageMaker's toolkit and SMDDP set these for one job, but they may remain in a shell: a script
# would take an old SM_CHANNEL_* for a channel of the new job.
_PREFIXES = ("SM_", "SMDATAPARALLEL_")
# Other variables with these prefixes are settings of the SDK.
_NAMES = {
    "TRAINING_JOB_NAME",
    "TRAINING_JOB_ARN",
    "SAGEMAKER_JOB_NAME",
    "SAGEMAKER_PROGRAM",
    "SAGEMAKER_SUBMIT_DIRECTORY",
    "SAGEMAKER_BASE_DIR",
    "SAGEMAKER_TRAINING_MODULE",
    "SAGEMAKER_INSTANCE_TYPE",
}


def without_other_jobs(base: Mapping[str, str]) -> dict[str, str]:
    """`base` without the variables of ranks and of SageMaker's jobs."""
    return {
        name: value
        for name, value in without_place(base).items()
        if not name.startswith(_PREFIXES) and name not in _NAMES
    }
