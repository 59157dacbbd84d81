"""A model for training: a detector with hundreds of small gradients, in pure torch.

The model has a ResNet of bottleneck blocks, a feature pyramid, and heads that all levels share, as
in RetinaNet. There are two differences. GroupNorm replaces BatchNorm, so that ranks stay
comparable. There are no anchors: every position of a level predicts the distances to the edges of
the box around it, as in FCOS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 20
STRIDES = (8, 16, 32)  # strides of the pyramid's levels
BOXES = 6  # per image
GROUP = 8  # channels per normalisation group


class ConvNorm(nn.Sequential):
    """A convolution with normalisation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
            nn.GroupNorm(outputs // GROUP, outputs),
        )


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.reduce = ConvNorm(inputs, width, 1)
        self.middle = ConvNorm(width, width, 3, stride)
        self.expand = ConvNorm(width, outputs, 1)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return features; of half the size if the stride is 2."""
        inner = functional.relu(self.middle(functional.relu(self.reduce(x))))
        return functional.relu(self.expand(inner) + self.shortcut(x))


class Detector(nn.Module):
    """Computes the loss of images with known boxes.

    Args:
        width: Channels of the first stage; 64 make a ResNet-50.
        blocks: Bottlenecks of the four stages.
        channels: Channels of the pyramid and the heads.
    """

    def __init__(self, width: int, blocks: Sequence[int], channels: int) -> None:
        super().__init__()
        self.stem = ConvNorm(3, width, 7, 2)
        self.stages = nn.ModuleList()
        inputs = width
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            strides = [1 if stage == 0 else 2] + [1] * (count - 1)
            places = zip([inputs, *[4 * inner] * (count - 1)], strides, strict=True)
            self.stages.append(nn.Sequential(*(Bottleneck(n, inner, s) for n, s in places)))
            inputs = 4 * inner
        levels = range(len(STRIDES))
        self.lateral = nn.ModuleList(nn.Conv2d(width * 8 * 2**i, channels, 1) for i in levels)
        self.smooth = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in levels)
        self.classes = _head(channels, CLASSES)
        self.edges = _head(channels, 4)

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        """Return the loss.

        Args:
            images: N x 3 x side x side.
            boxes: N x BOXES x 4: left, top, right, bottom, in pixels.
            labels: N x BOXES.
        """
        scores, edges, targets, distances = [], [], [], []
        for features, stride in zip(self._pyramid(images), STRIDES, strict=True):
            scores.append(self.classes(features).flatten(2).transpose(1, 2))
            edges.append(functional.softplus(self.edges(features).flatten(2).transpose(1, 2)))
            places = _places(features.shape[-1], stride)
            found = _targets(places, stride, boxes, labels)
            targets.append(found[0])
            distances.append(found[1])
        return _loss(*(torch.cat(part, 1) for part in (scores, edges, targets, distances)))

    def _pyramid(self, images: Tensor) -> list[Tensor]:
        x = functional.max_pool2d(functional.relu(self.stem(images)), 2)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        levels: list[Tensor] = []
        for lateral, x in zip(reversed(self.lateral), reversed(features[1:]), strict=True):
            level = lateral(x)
            if levels:
                level = level + functional.interpolate(levels[0], scale_factor=2.0)
            levels.insert(0, level)
        return [smooth(level) for smooth, level in zip(self.smooth, levels, strict=True)]


def _head(channels: int, outputs: int) -> nn.Sequential:
    tower: list[nn.Module] = []
    for _ in range(4):
        tower += [ConvNorm(channels, channels, 3), nn.ReLU()]
    return nn.Sequential(*tower, nn.Conv2d(channels, outputs, 3, padding=1))


def _places(size: int, stride: int) -> Tensor:
    """Return the centres of a level's positions, (size * size) x 2, in pixels."""
    line = (torch.arange(size) + 0.5) * stride
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], 1)


def _targets(places: Tensor, stride: int, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each position's class (CLASSES: background) and box distances, in strides."""
    low, high = boxes[:, None, :, :2], boxes[:, None, :, 2:]
    spot = places[None, :, None]
    distances = torch.cat([spot - low, high - spot], -1) / stride
    inside = distances.amin(-1) > 0
    area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)[:, None].expand(inside.shape)
    smallest, chosen = area.masked_fill(~inside, torch.inf).min(-1)
    classes = labels.gather(1, chosen).masked_fill(smallest.isinf(), CLASSES)
    return classes, distances.gather(2, chosen[..., None, None].expand(-1, -1, 1, 4)).squeeze(2)


def _loss(scores: Tensor, edges: Tensor, classes: Tensor, distances: Tensor) -> Tensor:
    """Return the focal loss of the classes plus smooth L1 of the edges where there is a box."""
    wanted = functional.one_hot(classes, CLASSES + 1)[..., :CLASSES].to(scores.dtype)
    p = scores.sigmoid()
    missed = torch.where(wanted > 0, 1 - p, p)
    weight = torch.where(wanted > 0, 0.25, 0.75) * missed.square()
    entropy = functional.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    positive = (classes < CLASSES)[..., None]
    off = functional.smooth_l1_loss(edges, distances, reduction="none") * positive
    return ((weight * entropy).sum() + off.sum()) / positive.sum().clamp(min=1)


class Workload:
    """The model and data for `ddp_task`.

    Args:
        setting: `rows` (images per rank and step), `side` (of an image, a multiple of 32) and
            `model` (arguments of `Detector`).
    """

    def __init__(self, setting: Mapping[str, Any]) -> None:
        self.rows, self.side, self.model = setting["rows"], setting["side"], setting["model"]

    def build(self) -> Detector:
        """Build the model, with the same weights every time."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Detector(**self.model)

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a rank's images, boxes and labels in a step; the same for every variant."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        images = torch.randn(self.rows, 3, self.side, self.side, generator=generator)
        corners = torch.rand(self.rows, BOXES, 2, 2, generator=generator) * self.side
        boxes = torch.cat([corners.amin(2), corners.amax(2)], -1)
        labels = torch.randint(CLASSES, (self.rows, BOXES), generator=generator)
        return images, boxes, labels
