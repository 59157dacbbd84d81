"""The data of a case: the same arrays in every rank, in all source types that Keras reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from stress.keras import heads
from stress.keras.build import structure
from stress.keras.layers import IDS, INPUT_SHAPES
from stress.keras.plan import Output, Plan

Arrays = list[Any]


@dataclass
class Data:
    """Arrays with equal numbers of rows.

    Attributes:
        x: The arrays of the inputs.
        y: The targets of the outputs.
        weight: The sample weights of each output, or None for all.
    """

    x: Arrays
    y: Arrays
    weight: Arrays | None

    def rows(self, chosen: Any) -> Data:
        """Return some rows."""
        parts = [[array[chosen] for array in part] for part in (self.x, self.y, self.weight or [])]
        return Data(parts[0], parts[1], parts[2] or None)

    def structured(self, plan: Plan) -> tuple[Any, ...]:
        """Return the data in the model's structure: x, y and optional weights."""
        parts = (structure(plan, "x", self.x), structure(plan, "out", self.y))
        return parts if self.weight is None else (*parts, structure(plan, "out", self.weight))


def data_of(plan: Plan, shapes: Sequence[Any], rows: int, reverse: bool, seed: int = 0) -> Data:
    """Return random data for a model with outputs of some shapes.

    Args:
        plan: The plan of the case.
        shapes: Shapes of the outputs.
        rows: Number of rows.
        reverse: Whether the rows of each batch are in reverse order.
        seed: 0 for training, another number for other data.
    """
    random = np.random.default_rng((plan.seed, seed))
    floats = "float64" if plan.dtype == "float64" else "float32"
    x = [_input(random, plan, place, rows, floats) for place in plan.inputs]
    outputs = list(zip(plan.outputs, shapes, strict=True))
    y = [targets(random, output, (rows, *shape[1:]), floats) for output, shape in outputs]
    weight = None
    if any(output.sample_weight for output in plan.outputs):
        weight = [_weight(random, output, (rows, *shape[1:-1])).astype(floats)
                  for output, shape in outputs]  # fmt: skip
    data = Data(x, y, weight)
    return data.rows(_reversed(plan, rows, seed)) if reverse else data


def _reversed(plan: Plan, rows: int, seed: int) -> list[int]:
    """Return row indices with each batch reversed: mathematically the same training."""
    size = plan.fit["batch_size"]
    ends = [rows]
    if seed == 0 and "validation_split" in plan.fit:
        ends.insert(0, math.floor(rows * (1.0 - plan.fit["validation_split"])))
    order: list[int] = []
    for end in ends:
        for first in range(len(order), end, size):
            order += range(min(first + size, end) - 1, first - 1, -1)
    return order


def _input(random: Any, plan: Plan, place: int, rows: int, floats: str) -> Any:
    value = plan.values[place]
    shape = (rows, *INPUT_SHAPES[value.kind])
    if value.kind != "ids":
        return random.normal(size=shape).astype(floats)
    ids = random.integers(0, IDS, shape).astype(np.int32)
    ids[:, 0] = np.maximum(ids[:, 0], 1)  # leave at least one step of a row unmasked
    for row in range(rows):
        ids[row, 1 + row % (shape[1] + 1) :] = 0
    return np.repeat(ids[-1:], rows, axis=0) if value.options.get("shared") else ids


def targets(random: Any, output: Output, shape: tuple[int, ...], floats: str) -> Any:
    """Return targets of a kind for an output of a shape."""
    kind = output.targets
    classes = random.integers(0, heads.WIDTH, shape[:-1])
    if kind == "class":
        return classes.astype(np.int32)
    if kind == "labels":  # at most half of the steps; 0 is for blanks
        labels = random.integers(1, heads.WIDTH, (shape[0], max(1, shape[1] // 2)))
        return labels.astype(np.int32)
    if kind == "one_hot":
        return np.eye(heads.WIDTH, dtype=floats)[classes]
    made = {
        "real": lambda: random.normal(size=shape),
        "positive": lambda: random.uniform(0.5, 2, shape),
        "sign": lambda: random.integers(0, 2, shape) * 2 - 1,
        "binary": lambda: random.integers(0, 2, shape),
        "probabilities": lambda: random.dirichlet(np.ones(shape[-1]), shape[:-1]),
    }
    return made[kind]().astype(floats)


def _weight(random: Any, output: Output, shape: tuple[int, ...]) -> Any:
    if output.loss in heads.OF_ROWS:
        shape = shape[:1]
    return random.uniform(0.1, 2, shape) if output.sample_weight else np.ones(shape)


# ---- sources -------------------------------------------------------------------------------------


def batches(data: Data, plan: Plan) -> Iterator[tuple[Any, ...]]:
    """Yield the batches of an epoch; Keras on TensorFlow accepts no lists from generators."""
    rows, size = plan.fit["rows"], plan.fit["batch_size"]
    for first in range(0, rows, size):
        batch = data.rows(slice(first, first + size)).structured(plan)
        yield keras.tree.lists_to_tuples(batch)


def source_of(data: Data, plan: Plan) -> dict[str, Any]:
    """Return the data arguments of `fit`."""
    source = plan.fit["source"]
    if source == "arrays":
        names = ("x", "y", "sample_weight")
        given = dict(zip(names, data.structured(plan), strict=False))
        return {**given, "batch_size": plan.fit["batch_size"]}
    return {"x": SOURCES[source](data, plan)}


def _tf_data(data: Data, plan: Plan) -> Any:
    import tensorflow as tf

    whole = keras.tree.lists_to_tuples(data.structured(plan))
    return tf.data.Dataset.from_tensor_slices(whole).batch(plan.fit["batch_size"])


def _loader(data: Data, plan: Plan) -> Any:
    import torch

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return int(plan.fit["rows"])

        def __getitem__(self, row: int) -> Any:
            return keras.tree.lists_to_tuples(data.rows(row).structured(plan))

    return torch.utils.data.DataLoader(Rows(), plan.fit["batch_size"])


class Batches(keras.utils.PyDataset):
    """The batches by index."""

    def __init__(self, data: Data, plan: Plan) -> None:
        super().__init__()
        self._batches = list(batches(data, plan))

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def _generator(data: Data, plan: Plan) -> Iterator[Any]:
    while True:
        yield from batches(data, plan)


SOURCES = {
    "tf.data": _tf_data,
    "DataLoader": _loader,
    "PyDataset": Batches,
    "generator": _generator,
}
