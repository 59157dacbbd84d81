"""A model for training: BERT-Medium (8 layers of 512, 41 M parameters) in pure torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 30522
POSITIONS = 512
WIDTH = 512
HEADS = 8
LAYERS = 8


class Bert(nn.Module):
    """Predicts the token at every position; the output weights are the input embedding's.

    The model has no dropout: two copies must stay bitwise equal.
    """

    def __init__(self, layers: int = LAYERS, width: int = WIDTH, words: int = VOCABULARY) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Embedding(POSITIONS, width)
        # BERT's own; PyTorch's default of 1 makes scores so large that gradients are denormal
        # numbers, which slow the backward pass of some CPUs down to a third.
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.scores = nn.Linear(width, words)
        self.scores.weight = self.words.weight
        nn.init.zeros_(self.scores.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch of token rows."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.encoder(self.norm(self.words(tokens) + self.positions(places)))
        return functional.cross_entropy(self.scores(hidden).flatten(0, 1), targets.flatten())


def build(seed: int, layers: int = LAYERS, width: int = WIDTH, words: int = VOCABULARY) -> Bert:
    """Build a model; the same seed gives the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Bert(layers, width, words)


def batch(step: int, rank: int, rows: int, tokens: int, words: int) -> tuple[Tensor, Tensor]:
    """Return a rank's tokens and targets in a step; the same for every variant."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    both = torch.randint(words, (2, rows, tokens), generator=generator)
    return both[0], both[1]


class Workload:
    """The model and data for `ddp_task`.

    Args:
        setting: `rows` (sequences per rank and step), `tokens` (of a sequence) and `model`
            (arguments of `build`).
    """

    def __init__(self, setting: Mapping[str, Any]) -> None:
        self.rows, self.tokens, self.model = setting["rows"], setting["tokens"], setting["model"]

    def build(self) -> Bert:
        """Build the model, with the same weights every time."""
        return build(seed=0, **self.model)

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return a rank's tokens and targets in a step."""
        return batch(step, rank, self.rows, self.tokens, self.model["words"])
