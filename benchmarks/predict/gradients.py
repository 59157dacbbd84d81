"""Gradients of well-known models, and the buckets that DDP makes of them: arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIB = 2**20
FIRST_BUCKET_NBYTES = MIB
BUCKET_NBYTES = 25 * MIB
GRADIENT_NBYTES = 4
"""Of each element: float32."""
BACKWARD_SHARE = 2 / 3
"""Of a step's computing: backward multiplies two matrices for each that forward does."""


@dataclass(frozen=True)
class Release:
    """Gradients that are reduced together.

    Attributes:
        nbytes: How much.
        share: Of the rank's computing in a step, what is done when the last of them is there.
    """

    nbytes: int
    share: float


def buckets(
    sizes: Sequence[int], first_nbytes: int = FIRST_BUCKET_NBYTES, nbytes: int = BUCKET_NBYTES
) -> list[list[int]]:
    """Which gradients DDP reduces together, after its first step.

    A bucket is closed by the gradient that reaches the limit, and holds that one, too.

    Args:
        sizes: Bytes of every parameter, in the model's order.
        first_nbytes: Limit of the bucket that is reduced first.
        nbytes: Limit of the others.

    Returns:
        Indices of parameters; buckets and what is in them in the order of the backward pass.
    """
    found: list[list[int]] = [[]]
    held, limit = 0, first_nbytes
    for index in reversed(range(len(sizes))):
        found[-1].append(index)
        held += sizes[index]
        if held >= limit:
            found.append([])
            held, limit = 0, nbytes
    return [bucket for bucket in found if bucket]


def releases(sizes: Sequence[int], groups: Sequence[Sequence[int]]) -> list[Release]:
    """When gradients that are reduced together are there.

    The backward pass spends as much time on a parameter as that has of all bytes.

    Args:
        sizes: Bytes of every parameter.
        groups: What ``buckets`` returns, or every gradient alone, in the order of the backward
            pass.
    """
    found, done, total = [], 0, sum(sizes)
    for group in groups:
        nbytes = sum(sizes[index] for index in group)
        done += nbytes
        found.append(Release(nbytes, 1 - BACKWARD_SHARE * (1 - done / total)))
    return found


def one_by_one(sizes: Sequence[int]) -> list[list[int]]:
    """Every gradient alone, in the order of the backward pass."""
    return [[index] for index in reversed(range(len(sizes)))]


def bert_large() -> list[int]:
    """Elements of BERT-large's parameters, with its heads for pre-training: 336 M."""
    width, words, positions, layers = 1024, 30522, 512, 24
    norm = [width, width]
    layer = _linear(width, width) * 4 + norm + _linear(width, 4 * width) + _linear(4 * width, width)
    embeddings = [words * width, positions * width, 2 * width, *norm]
    pooler = _linear(width, width)
    heads = [words, *_linear(width, width), *norm, *_linear(width, 2)]
    return embeddings + (layer + norm) * layers + pooler + heads


def gpt2_xl() -> list[int]:
    """Elements of the largest GPT-2's parameters: 1558 M; output weights are the input's."""
    width, words, positions, layers = 1600, 50257, 1024, 48
    norm = [width, width]
    attention = _linear(width, 3 * width) + _linear(width, width)
    layer = norm + attention + norm + _linear(width, 4 * width) + _linear(4 * width, width)
    return [words * width, positions * width] + layer * layers + norm


def resnet50() -> list[int]:
    """Elements of ResNet-50's parameters, for 1000 classes: 25.6 M."""
    found = _convolution(3, 64, 7)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            found += _convolution(inputs, width, 1)
            found += _convolution(width, width, 3)
            found += _convolution(width, 4 * width, 1)
            if block == 0:  # what goes past the first block has to become as wide
                found += _convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return found + _linear(inputs, 1000)


def _linear(inputs: int, outputs: int) -> list[int]:
    """Weights and biases."""
    return [inputs * outputs, outputs]


def _convolution(inputs: int, outputs: int, side: int) -> list[int]:
    """Weights, and those of the batch normalization behind it."""
    return [inputs * outputs * side * side, outputs, outputs]


MODELS: dict[str, Callable[[], list[int]]] = {
    "bert-large": bert_large,
    "gpt2-xl": gpt2_xl,
    "resnet50": resnet50,
}


def sizes_of(model: str) -> list[int]:
    """Bytes of a model's gradients, in the order of its parameters.

    Raises:
        ValueError: There is no such model.
    """
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}; there are {', '.join(MODELS)}")
    return [GRADIENT_NBYTES * elements for elements in MODELS[model]()]
