"""The estimators of frameworks, which differ as SageMaker's containers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from sdp_plugins.sagemaker.estimator import Estimator


class PyTorch(Estimator):
    """Runs a PyTorch script; takes the arguments of `Estimator`."""

    framework = "sagemaker_pytorch_container.training:main"


class TensorFlow(Estimator):
    """Runs a TensorFlow script, which also gets `--model_dir`.

    Args:
        model_dir: Value of `--model_dir`; None: the folder of SM_MODEL_DIR, as in the SDK's local
            mode; False: no `--model_dir`.
        **arguments: The arguments of `Estimator`.
    """

    framework = "sagemaker_tensorflow_container.training:main"

    def __init__(self, *, model_dir: str | Literal[False] | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.model_dir = model_dir

    def _sent(self, ml: Path, name: str) -> dict[str, Any]:
        chosen = (
            {} if self.model_dir is False else {"model_dir": self.model_dir or str(ml / "model")}
        )
        return {**chosen, **super()._sent(ml, name)}


class HuggingFace(PyTorch):
    """Runs a script that uses HuggingFace's libraries, in the installed versions.

    Args:
        transformers_version: Ignored: the job runs with the installed version.
        pytorch_version: Ignored: the job runs with the installed version.
        tensorflow_version: Selects TensorFlow, in the installed version; the default is PyTorch.
        **arguments: The arguments of `Estimator`.

    Raises:
        ValueError: An argument is invalid, or both frameworks are given.
    """

    def __init__(
        self,
        *,
        transformers_version: str | None = None,
        pytorch_version: str | None = None,
        tensorflow_version: str | None = None,
        **arguments: Any,
    ) -> None:
        if pytorch_version is not None and tensorflow_version is not None:
            raise ValueError(  # the SDK's text
                "tensorflow_version and pytorch_version are both not None. "
                "Specify only tensorflow_version or pytorch_version."
            )
        super().__init__(**arguments)
        if tensorflow_version is not None:
            self.framework = TensorFlow.framework
