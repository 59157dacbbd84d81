"""The choices of `--ddp_backend`: smddp among them.

`TrainingArguments(ddp_backend="smddp")` takes any name. A script that has its arguments from the
command line, by HfArgumentParser, offers the names that the field's metadata list, and refuses
others.
"""

from __future__ import annotations

from dataclasses import fields
from types import ModuleType

from sdp_plugins.huggingface.upstream import BACKEND


def patch(module: ModuleType) -> None:
    """Add the name, if there is a list.

    Args:
        module: `transformers.training_args`.
    """
    for field in fields(module.TrainingArguments):
        choices = field.metadata.get("choices")
        if field.name == "ddp_backend" and isinstance(choices, list) and BACKEND not in choices:
            choices.append(BACKEND)
