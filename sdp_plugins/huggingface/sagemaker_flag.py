"""Makes transformers ignore SageMaker's variables in jobs that accelerate runs on CPUs.

If `is_sagemaker_dp_enabled()` returns true, `Trainer._wrap_model` (trainer.py:2682 of transformers
5.23.0) passes device_ids to DDP, which refuses them for models on CPUs, and ignores
`ddp_find_unused_parameters`; `TrainingArguments.parallel_mode` (training_args.py:1993) is not
DISTRIBUTED, so that Trainer logs the loss of rank 0 alone. Once accelerate's state is MULTI_CPU the
patched function returns false, and accelerate wraps the model as in any job on CPUs.
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
    """Patch the modules of transformers that call the function, now or when they are imported."""
    for name in PLACES:
        wrapt.register_post_import_hook(patch, name)


def patch(module: ModuleType) -> None:
    """Replace `is_sagemaker_dp_enabled` in one module, if the module is unchanged."""
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
    """Wrap transformers' function: return false in jobs on CPUs."""

    @functools.wraps(asked)
    def is_sagemaker_dp_enabled() -> bool:
        return asked() and not on_cpus()

    setattr(is_sagemaker_dp_enabled, PATCHED, True)
    return is_sagemaker_dp_enabled


def on_cpus() -> bool:
    """Whether accelerate has chosen the type MULTI_CPU."""
    from accelerate.state import PartialState

    return PartialState._shared_state.get("distributed_type") == "MULTI_CPU"
