"""HuggingFace's Trainer and accelerate over smddp, on CPUs.

Scripts import and call nothing. `backend_choice` patches accelerate's choice of a backend, and
`offer_smddp` adds smddp to the choices of an option of transformers. The patches apply when
accelerate and transformers are imported, and affect only jobs that use smddp. `SDP_HUGGINGFACE=0`
disables them. See docs/huggingface.md.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from types import ModuleType

log = logging.getLogger(__name__)


def patch(module: ModuleType) -> None:
    """Have a module of theirs know smddp; never raises, and a second time changes nothing.

    Args:
        module: `accelerate.state` or `transformers.training_args`, as it is imported.
    """
    try:
        from sdp_plugins.core.config import patches_huggingface

        if not patches_huggingface():
            return
        if module.__name__ == "transformers.training_args":
            offer_smddp(module)
        else:
            from sdp_plugins.huggingface import backend_choice

            backend_choice.patch(module)
    except Exception:
        log.debug("%s was not patched", module.__name__, exc_info=True)


def offer_smddp(module: ModuleType) -> None:
    """Add smddp and smddp_sharded to the choices of `--ddp_backend`, if there is a list.

    `TrainingArguments(ddp_backend="smddp")` takes any name, but HfArgumentParser refuses names that
    the field's metadata do not list (transformers 5.23.0: training_args.py:1435).
    """
    from sdp_plugins.huggingface.sharded import SHARDED
    from sdp_plugins.torch.backend_name import BACKEND

    for field in fields(module.TrainingArguments):
        choices = field.metadata.get("choices")
        if field.name == "ddp_backend" and isinstance(choices, list) and BACKEND not in choices:
            choices += [BACKEND, SHARDED]
