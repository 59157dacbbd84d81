"""The estimators of frameworks: what SageMaker's containers of each do differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from sdp_plugins.sagemaker.estimator import Estimator


class PyTorch(Estimator):
    """Runs a PyTorch script; arguments as `Estimator`."""

    framework = "sagemaker_pytorch_container.training:main"


class TensorFlow(Estimator):
    """Runs a TensorFlow script, which also gets `--model_dir`; arguments as `Estimator`.

    Args:
        model_dir: What the script gets as `--model_dir`; None: the folder of SM_MODEL_DIR, as in
            the SDK's local mode; False: it gets none.
        **arguments: See `Estimator`.
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
    """Runs a script that uses HuggingFace's libraries: those that are installed here.

    Args:
        transformers_version: Taken; the job runs with what is installed.
        pytorch_version: Taken; whichever it is, the script is one of PyTorch's, as without it.
        tensorflow_version: Taken; whichever it is, the script is one of TensorFlow's.
        py_version: Taken; the job runs in this Python.
        **arguments: See `Estimator`.

    Raises:
        ValueError: See `Estimator`; or the script is said to be both frameworks'.
    """

    def __init__(
        self,
        *,
        transformers_version: str | None = None,
        pytorch_version: str | None = None,
        tensorflow_version: str | None = None,
        py_version: str | None = None,
        **arguments: Any,
    ) -> None:
        if pytorch_version is not None and tensorflow_version is not None:
            raise ValueError(  # as the SDK says it
                "tensorflow_version and pytorch_version are both not None. "
                "Specify only tensorflow_version or pytorch_version."
            )
        super().__init__(**arguments)
        if tensorflow_version is not None:
            self.framework = TensorFlow.framework
