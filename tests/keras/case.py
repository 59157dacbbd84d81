"""One case of what is trained: what differs from arrays, a small classifier and usual options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import ops

from tests.keras.models import BATCH, ROWS, arrays, crossentropy, dense

Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        rows: Of the arrays.
        batch_size: Of `fit`.
        epochs: Of `fit`.
        build: Makes the model.
        compile: Makes options of `compile`.
        data: Makes x and y, for a number of rows.
        source: Makes what `fit` reads instead of those, and the options that go with it.
        fit: Makes options of `fit`, for a number of rows.
        only_fits: `evaluate` and `predict` do not meet what the case is about.
        compiler: Torch's, where the step is compiled; in one process torch does without.
        tolerance: Of the numbers; None where one process makes something else.
        on_three: Backends on which it is tried on three ranks as well, which do not divide batches
            evenly. If any, `make test-long` tries it so on all.
        versions: Run with other versions as well: such cases need every private name of Keras.
        long: The backends on which the case takes long and is left to `make test-long`.
        unsupported: Why Keras itself has no such case, by backend.
    """

    rows: int = ROWS
    batch_size: int | None = BATCH
    epochs: int = 2
    build: Callable[[], Any] = dense
    compile: Callable[[], dict[str, Any]] = dict
    data: Callable[[int], tuple[Any, Any]] = arrays
    source: Callable[[int], dict[str, Any]] | None = None
    fit: Callable[[int], dict[str, Any]] = lambda rows: {}
    only_fits: bool = False
    compiler: str = ""
    tolerance: float | None = 2e-5
    on_three: tuple[str, ...] = ()
    versions: bool = False
    long: tuple[str, ...] = ()
    unsupported: Mapping[str, str] = field(default_factory=dict)

    def compiled(self, world: int) -> Any:
        """The model, for one process or several."""
        model = self.build()
        options = {
            "optimizer": keras.optimizers.SGD(0.1, momentum=0.5),
            "loss": crossentropy(),
            "metrics": ["accuracy"],
        }
        if self.compiler:
            options["jit_compile"] = keras.backend.backend() != "torch" or world > 1
        model.compile(**options | self.compile())
        return model

    def fit_options(self) -> dict[str, Any]:
        x, y = self.data(self.rows)
        given = {"x": x, "y": y, "batch_size": self.batch_size}
        read = self.source(self.rows) if self.source else given
        return {"shuffle": False, "epochs": self.epochs} | read | self.fit(self.rows)

    def train(self, model: Any, *callbacks: Any) -> Result:
        """What comes of `fit`, `evaluate` and `predict`; and the variables at the end."""
        batches = Batches()
        by_torch = self.compiler and keras.backend.backend() == "torch"
        with compiled_by(self.compiler) if by_torch else nullcontext():
            callbacks = (*callbacks, batches)
            history = model.fit(**self.fit_options(), verbose=0, callbacks=callbacks)
        result = {"history": history.history, "batches": batches.logs}
        if not (self.only_fits or by_torch):
            x, y = self.data(self.rows)
            result["evaluation"] = model.evaluate(
                x, y, batch_size=BATCH, verbose=0, return_dict=True
            )
            predicted = model.predict(x, batch_size=BATCH, verbose=0)
            result["prediction"] = keras.tree.map_structure(np.asarray, predicted)
        result["variables"] = variables(model)
        return result


class Batches(keras.callbacks.Callback):
    """The logs after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append({name: float(value) for name, value in logs.items()})


def compiled_by(compiler: str) -> Any:
    """Torch's compilers are chosen by name."""
    import torch

    return mock.patch.object(torch, "compile", partial(torch.compile, backend=compiler))


def variables(model: Any) -> Result:
    """All but the states of random generators."""
    seeds = {
        id(generator.state)
        for layer in model._flatten_layers()
        for generator in layer._seed_generators
    }
    return {
        variable.path: ops.convert_to_numpy(variable)
        for variable in [*model.variables, *model.optimizer.variables]
        if id(variable) not in seeds
    }
