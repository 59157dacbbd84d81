"""A model with large layers, and who may write its gradients: for tests of direct gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sdp_plugins.torch.direct_gradients import Destination

Layers = Callable[[Tensor], Tensor]
WIDTH, WORDS = 1024, 1100
LARGE = ["embedding.weight", "wide.weight", "bare.weight"]


class Text(nn.Module):
    """An embedding with padding, whose weight is also that of the last layer, and layers between.

    Args:
        how: Calls the layers between.
    """

    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.wide = nn.Linear(WIDTH, WIDTH)
        self.bare = nn.Linear(WIDTH, WIDTH, bias=False)
        self.small = nn.Linear(WIDTH, 3)
        self.scores = nn.Linear(WIDTH, WORDS)
        self.scores.weight = self.embedding.weight
        self.how = how

    def layers(self, x: Tensor) -> Tensor:
        found: Tensor = self.wide(torch.tanh(self.bare(x)))
        return found

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.how(self.layers, self.embedding(words))
        loss = functional.cross_entropy(self.scores(hidden).view(-1, WORDS), words.flatten())
        return loss + self.small(hidden).square().mean()


def make(how: Any = None) -> Text:
    torch.manual_seed(0)
    return Text(how or every_layer)


def words(rank: int, step: int, shape: tuple[int, ...] = (2, 5)) -> Tensor:
    """Few words, so that some come twice; and the padding."""
    random = torch.Generator().manual_seed(100 * step + rank)
    found = torch.randint(1, 9, shape, generator=random)
    found.view(-1)[:-1:2] = 0
    return found


@contextmanager
def writes(count: int | None = None) -> Iterator[list[bool]]:
    """What layers are told that want to write: whether they may; so many of them have."""
    told: list[bool] = []
    plain = Destination.open

    def opened(destination: Destination) -> Any:
        told.append((found := plain(destination)) is not None)
        return found

    with mock.patch.object(Destination, "open", opened):
        yield told
    assert count is None or sum(told) == count, (told, count)


def every_layer(layers: Layers, x: Tensor) -> Tensor:
    return layers(x)


def no_layer(layers: Layers, x: Tensor) -> Tensor:
    return x


def twice(layers: Layers, x: Tensor) -> Tensor:
    return layers(layers(x))


def again(layers: Layers, x: Tensor, use_reentrant: bool) -> Tensor:
    found: Tensor = checkpoint(layers, x, use_reentrant=use_reentrant)
    return found


def in_place(layers: Layers, x: Tensor) -> Tensor:
    return layers(x.mul_(2)).relu_()


def transposed(layers: Layers, x: Tensor) -> Tensor:
    return layers(x.transpose(0, 1)).transpose(0, 1)


checkpointed = partial(again, use_reentrant=False)
WAYS: list[tuple[Any, tuple[int, ...]]] = [
    (None, (2, 5)),
    (None, (7,)),
    (None, ()),
    (None, (2, 3, 5)),
    (twice, (2, 5)),
    (in_place, (2, 5)),
    (in_place, (2, 3, 5)),
    (transposed, (2, 5)),
    (checkpointed, (2, 5)),
    (partial(again, use_reentrant=True), (2, 5)),
]


def changed_layers(model: nn.Module) -> set[str]:
    return {name for name, layer in model.named_modules() if "forward" in layer.__dict__}
