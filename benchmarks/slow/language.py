"""A small language model, on real English text that comes with Python."""

from __future__ import annotations

import math
import pydoc_data.topics
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

CONTEXT = 64
ROWS = 32
"""Sequences of a rank's batch."""
HELD_OUT = 0.05
WIDTH, HEADS, LAYERS = 64, 4, 2
RATE = 4e-3
"""AdamW's highest. With 8e-3, float32 ends 0.5 % lower, and local updates end higher."""
WARM_UP = 0.05
"""Share of the steps in which the rate rises; then it falls, by a cosine, to a tenth."""


@lru_cache
def text() -> tuple[Tensor, Tensor, int]:
    """The characters to train on and those held out, as numbers, and how many numbers there are."""
    whole = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    letters = {letter: number for number, letter in enumerate(sorted(set(whole)))}
    numbers = torch.tensor([letters[letter] for letter in whole])
    cut = int(len(numbers) * (1 - HELD_OUT))
    return numbers[:cut], numbers[cut:], len(letters)


class Language(nn.Module):
    """A transformer that predicts the next character; it has no dropout."""

    def __init__(self) -> None:
        super().__init__()
        letters = text()[2]
        self.letters = nn.Embedding(letters, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        for embedding in (self.letters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH,
            HEADS,
            4 * WIDTH,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, letters)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the next characters, in nats."""
        hidden = self.letters(inputs) + self.positions.weight
        hidden = self.encoder(hidden, mask=self.mask, is_causal=True)
        return functional.cross_entropy(
            self.head(self.norm(hidden)).flatten(0, 1), targets.flatten()
        )


class LanguageWorkload:
    """The model and data of a seed.

    Args:
        seed: Of the weights and of the batches.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def build(self) -> Language:
        """Build the model; the same seed gives the same weights."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return Language()

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
        """Return the learning rates of so many steps."""
        warm_up = math.ceil(WARM_UP * steps)

        def share(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            done = min((step - warm_up) / (steps - warm_up), 1.0)
            return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2

        return LambdaLR(optimizer, share)

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return a rank's inputs and targets in a step."""
        generator = torch.Generator().manual_seed(10_000_000 * self.seed + 1000 * step + rank)
        return _cut(text()[0], generator, ROWS)

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of the evaluation, the same for all seeds."""
        return _cut(text()[1], torch.Generator().manual_seed(1), 256)


def _cut(numbers: Tensor, generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(numbers) - CONTEXT - 1, (rows,), generator=generator)
    places = starts[:, None] + torch.arange(CONTEXT + 1)
    return numbers[places[:, :-1]], numbers[places[:, 1:]]
