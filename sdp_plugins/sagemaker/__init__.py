"""SageMaker's training jobs on this machine: no AWS account, no Docker.

::

    from sdp_plugins.sagemaker import PyTorch

    estimator = PyTorch(
        entry_point="train.py",
        instance_count=2,
        instance_type="local",
        distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
    )
    estimator.fit({"training": "file://data"})

Scripts find SageMaker's folders and variables, and are started as by SageMaker's toolkit. See
docs/sagemaker.md.
"""

from sdp_plugins.sagemaker.estimator import Estimator, TrainingJobError
from sdp_plugins.sagemaker.frameworks import HuggingFace, PyTorch, TensorFlow

__all__ = ["Estimator", "HuggingFace", "PyTorch", "TensorFlow", "TrainingJobError"]
