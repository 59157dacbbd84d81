"""The variables that a job inherits from this process: all but those of another job."""

from __future__ import annotations

from collections.abc import Mapping

from sdp_plugins.launch.clean_environment import without_place

# SageMaker's toolkit and SMDDP set these for one job, and shells keep them: a script would take an
# old SM_CHANNEL_* for a channel of the new job.
_PREFIXES = ("SM_", "SMDATAPARALLEL_")
# The others that begin so are settings of the SDK, not facts of a job.
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
    """`base` less places of ranks, and SageMaker's facts of a job."""
    return {
        name: value
        for name, value in without_place(base).items()
        if not name.startswith(_PREFIXES) and name not in _NAMES
    }
