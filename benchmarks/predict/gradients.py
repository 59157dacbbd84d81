"""Gradients of well-known models, and DDP's buckets of them, computed from shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIB = 2**20
FIRST_BUCKET_NBYTES = MIB
BUCKET_NBYTES = 25 * MIB
GRADIENT_NBYTES = 4
"""Bytes of each element: float32."""
BACKWARD_SHARE = 2 / 3
"""Share of a step's computation: backward multiplies two matrices for each of forward."""


@dataclass(frozen=True)
class Release:
    """Gradients that are reduced together.

    Attributes:
        nbytes: Size of the gradients.
        share: Share of the step's computation that is done when the last of them is ready.
    """

    nbytes: int
    share: float


def buckets(
    sizes: Sequence[int], first_nbytes: int = FIRST_BUCKET_NBYTES, nbytes: int = BUCKET_NBYTES
) -> list[list[int]]:
    """Return which gradients DDP reduces together after its first step.

    The gradient that reaches the limit closes the bucket and belongs to it.

    Args:
        sizes: Bytes of every parameter, in the model's order.
        first_nbytes: Limit of the bucket that is reduced first.
        nbytes: Limit of the others.

    Returns:
        Indices of parameters; buckets and their members in the order of the backward pass.
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
    """Return when gradients that are reduced together are ready.

    A parameter's share of the backward pass equals its share of all bytes.

    Args:
        sizes: Bytes of every parameter.
        groups: The result of ``buckets``, or each gradient alone, in the order of the backward
            pass.
    """
    found, done, total = [], 0, sum(sizes)
    for group in groups:
        nbytes = sum(sizes[index] for index in group)
        done += nbytes
        found.append(Release(nbytes, 1 - BACKWARD_SHARE * (1 - done / total)))
    return found


def one_by_one(sizes: Sequence[int]) -> list[list[int]]:
    """Return each gradient alone, in the order of the backward pass."""
    return [[index] for index in reversed(range(len(sizes)))]


def bert_large() -> list[int]:
    """Return the sizes of BERT-large's parameters, with its pre-training heads: 336 M elements."""
    width, words, positions, layers = 1024, 30522, 512, 24
    norm = [width, width]
    layer = _linear(width, width) * 4 + norm + _linear(width, 4 * width) + _linear(4 * width, width)
    embeddings = [words * width, positions * width, 2 * width, *norm]
    pooler = _linear(width, width)
    heads = [words, *_linear(width, width), *norm, *_linear(width, 2)]
    return embeddings + (layer + norm) * layers + pooler + heads


def gpt2_xl() -> list[int]:
    """Return the sizes of the largest GPT-2's parameters, with tied embeddings: 1558 M elements."""
    width, words, positions, layers = 1600, 50257, 1024, 48
    norm = [width, width]
    attention = _linear(width, 3 * width) + _linear(width, width)
    layer = norm + attention + norm + _linear(width, 4 * width) + _linear(4 * width, width)
    return [words * width, positions * width] + layer * layers + norm


def resnet50() -> list[int]:
    """Return the sizes of ResNet-50's parameters, for 1000 classes: 25.6 M elements."""
    found = _convolution(3, 64, 7)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            found += _convolution(inputs, width, 1)
            found += _convolution(width, width, 3)
            found += _convolution(width, 4 * width, 1)
            if block == 0:  # the shortcut's projection to the new width
                found += _convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return found + _linear(inputs, 1000)


def _linear(inputs: int, outputs: int) -> list[int]:
    """Return the sizes of weights and biases."""
    return [inputs * outputs, outputs]


def _convolution(inputs: int, outputs: int, side: int) -> list[int]:
    """Return the sizes of the weights, and of those of the batch normalization after it."""
    return [inputs * outputs * side * side, outputs, outputs]


MODELS: dict[str, Callable[[], list[int]]] = {
    "bert-large": bert_large,
    "gpt2-xl": gpt2_xl,
    "resnet50": resnet50,
}


def sizes_of(model: str) -> list[int]:
    """Return the bytes of a model's gradients, in the order of its parameters.

    Raises:
        ValueError: There is no such model.
    """
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}; there are {', '.join(MODELS)}")
    return [GRADIENT_NBYTES * elements for elements in MODELS[model]()]
