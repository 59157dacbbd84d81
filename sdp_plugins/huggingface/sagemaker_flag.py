"""transformers' question for SageMaker's variables, where accelerate trains on CPUs already.

`is_sagemaker_dp_enabled()` makes Trainer wrap the model by itself, with the GPU of the rank as
device_ids, which DDP refuses for models on the CPU. It also hides from Trainer that the job is
distributed, so that rank 0's loss is logged as if it were the job's. Once accelerate's state is
MULTI_CPU the answer is no, and both are left to accelerate, as in any other job on CPUs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from sdp_plugins.huggingface.upstream import PATCHED, Upstream, mentions

FLAG = "is_sagemaker_dp_enabled"
CHECKED = ((4, 48), (5, 24))
ARGUMENTS = Upstream(
    "transformers",
    CHECKED,
    "TrainingArguments.parallel_mode (training_args.py)",
    lambda module: mentions(module.TrainingArguments.parallel_mode.fget, FLAG),
)
TRAINER = Upstream(
    "transformers",
    CHECKED,
    "Trainer._wrap_model (trainer.py)",
    lambda module: mentions(module.Trainer._wrap_model, FLAG, "SMDATAPARALLEL_LOCAL_RANK"),
)
PLACES = {"transformers.training_args": ARGUMENTS, "transformers.trainer": TRAINER}


def keep_from_transformers() -> None:
    """Answer no to transformers' modules that ask, now or when they are imported."""
    for name in PLACES:
        wrapt.register_post_import_hook(patch, name)


def patch(module: ModuleType) -> None:
    """Replace the flag's function in one module, if the module is unchanged."""
    asked = getattr(module, FLAG, None)
    if hasattr(asked, PATCHED):
        return
    version = sys.modules["transformers"].__version__
    place = PLACES[module.__name__]
    if why := place.why_not(module, version):
        place.complain(why)
    else:
        setattr(module, FLAG, answering(asked))


def answering(asked: Any) -> Callable[[], bool]:
    """Wrap transformers' function: answer no in jobs on CPUs."""

    @functools.wraps(asked)
    def is_sagemaker_dp_enabled() -> bool:
        return asked() and not on_cpus()

    setattr(is_sagemaker_dp_enabled, PATCHED, True)
    return is_sagemaker_dp_enabled


def on_cpus() -> bool:
    """Whether accelerate has set this process up as a rank of a job on CPUs."""
    from accelerate.state import PartialState

    return PartialState._shared_state.get("distributed_type") == "MULTI_CPU"
