"""Adds smddp to the choices of `--ddp_backend`.

`TrainingArguments(ddp_backend="smddp")` takes any name, but HfArgumentParser refuses names that the
field's metadata do not list (transformers 5.23.0: training_args.py:1435).
"""

from __future__ import annotations

from dataclasses import fields
from types import ModuleType

from sdp_plugins.torch.backend_name import BACKEND


def patch(module: ModuleType) -> None:
    """Add the name, if there is a list.

    Args:
        module: `transformers.training_args`.
    """
    for field in fields(module.TrainingArguments):
        choices = field.metadata.get("choices")
        if field.name == "ddp_backend" and isinstance(choices, list) and BACKEND not in choices:
            choices.append(BACKEND)
