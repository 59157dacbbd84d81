"""What `fit` may read instead of arrays: its argument, and what else it needs with that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from tests.keras.models import BATCH, ROWS, arrays


def dataset(rows: int) -> dict[str, Any]:
    import tensorflow as tf

    return {"x": tf.data.Dataset.from_tensor_slices(arrays(rows)).batch(BATCH)}


def shuffled_dataset(rows: int) -> dict[str, Any]:
    """In another order at every iteration, of which plain Keras takes some more than epochs."""
    import tensorflow as tf

    tf.random.set_seed(1)  # counts beside the other
    data = tf.data.Dataset.from_tensor_slices(arrays()).shuffle(ROWS, seed=3).batch(BATCH)
    return {"x": data, "validation_data": data}


def unknown_length(rows: int) -> dict[str, Any]:
    """Ends when it ends."""
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(arrays(rows)).filter(lambda *_: True).batch(BATCH)
    return {"x": data, "validation_data": data}


def repeated_dataset(rows: int) -> dict[str, Any]:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(arrays()).repeat().batch(5)
    return {"x": data, "steps_per_epoch": 4}


def loader(rows: int) -> dict[str, Any]:
    import torch

    x, y = map(torch.from_numpy, arrays(rows))
    return {"x": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), BATCH)}


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return tuple(part[BATCH * index : BATCH * index + BATCH] for part in arrays(21))


def py_dataset(rows: int) -> dict[str, Any]:
    return {"x": Sequence()}


def generator(rows: int) -> dict[str, Any]:
    def batches() -> Iterator[Any]:
        x, y = arrays(21)
        while True:
            for begin in range(0, 21, BATCH):
                yield x[begin : begin + BATCH], y[begin : begin + BATCH]

    return {"x": batches(), "steps_per_epoch": 3}
