"""A tiny BERT that learns to fill gaps in a text that comes with Python, as run_mlm does."""

from __future__ import annotations

import hashlib
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

TOKENS = 24  # of a row; a token is a byte
MASK = 256
NOT_ASKED = -100  # what the loss leaves out


@cache
def rows(count: int) -> list[Tensor]:
    """Rows of the text."""
    text = "".join(topics[name] for name in sorted(topics)).encode()[: count * TOKENS]
    return list(torch.tensor(list(text)).view(count, TOKENS))


def gaps(batch: list[Tensor]) -> dict[str, Tensor]:
    """One token in seven is asked for.

    The choice follows from the batch: accelerate fetches one ahead, so that a checkpoint's random
    state is one batch too late for a resumed training to make the same choices (over gloo, too).
    """
    tokens = torch.stack(batch)
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    asked = torch.rand(tokens.shape, generator=generator) < 0.15
    asked[:, 0] = True  # so that every loss is a number
    labels = torch.where(asked, tokens, NOT_ASKED)
    return {"input_ids": torch.where(asked, MASK, tokens), "labels": labels}


def bert(width: int = 64) -> BertForMaskedLM:
    """Two layers, with dropout."""
    torch.manual_seed(3)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": TOKENS}
    config = BertConfig(vocab_size=300, hidden_size=width, intermediate_size=128, **sizes)
    return BertForMaskedLM(config)


def trainer(folder: str, rows_count: int = 64, width: int = 64, **arguments: Any) -> Trainer:
    """A Trainer with these arguments."""
    given = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        **arguments,
    }
    return Trainer(
        bert(width),
        TrainingArguments(**given),
        data_collator=gaps,
        train_dataset=rows(rows_count),
        eval_dataset=rows(7),
    )


def losses(trained: Trainer) -> list[float]:
    """The job's loss in each step, as it was logged."""
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def digest(model: torch.nn.Module) -> str:
    """Of all weights' bytes."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()[:16]
