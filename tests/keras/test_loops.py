"""Custom loops: the strategy's collectives, and steps of single batches."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from sdp_plugins.keras import SMDDPStrategy
from tests.keras.first_ranks import BACKENDS, on_ranks
from tests.keras.models import arrays
from tests.keras.strategies import compiled, error_of, fails, strategy


def seen_rows(y_true: Any, y_pred: Any) -> Any:
    """A metric of the program's own, which gets all ranks' rows."""
    return ops.sum(ops.ones_like(ops.cast(y_true, "float32")))


@pytest.mark.versions
@on_ranks(3, BACKENDS)
def test_collectives_in_own_loops(rank: int, world: int) -> None:
    numpy = ops.convert_to_numpy
    with strategy() as made:
        numbers = ops.convert_to_tensor(np.arange(3, dtype=np.float32) + rank)
        square = ops.reshape(ops.arange(4, dtype="float32"), (2, 2))
        rows = ops.convert_to_tensor(np.full((rank + 1, 2), rank, np.float32))
        variable = keras.Variable(np.full(4, rank, np.float32))
        made.broadcast_variables([variable], root=world - 1)
        gathered = [[0, 0], *[[1, 1]] * 2, *[[2, 2]] * 3]
        assert numpy(made.all_reduce(numbers)).tolist() == [1, 2, 3]
        assert numpy(made.all_reduce(numbers, "sum")).tolist() == [3, 6, 9]
        assert numpy(made.all_reduce(ops.transpose(square))).tolist() == [[0, 2], [1, 3]]
        assert numpy(made.gather(rows)).tolist() == gathered
        columns = numpy(made.gather(ops.transpose(rows), axis=1))
        assert columns.tolist() == np.transpose(gathered).tolist()
        assert numpy(variable).tolist() == [2, 2, 2, 2]


@pytest.mark.versions
@on_ranks(3, BACKENDS)
def test_batches_in_own_loops(rank: int, world: int) -> Any:
    with strategy() as made:
        model = compiled(made, metrics=["accuracy", seen_rows])
        seven = [part[:7] for part in arrays()]
        trained = model.train_on_batch(*seven, return_dict=True)
        tested = model.test_on_batch(*arrays(), return_dict=True)
        assert trained["seen_rows"] == 7
        assert np.asarray(model.predict_on_batch(seven[0])).shape == (7, 3)
        return json.loads(json.dumps([trained, tested], default=float))


# ---- ranks that differ -----------------------------------------------------------------------


@fails(
    "gather: ranks disagree: rank 0: rows of float32[2]; rank 1: rows of int32[2]. Hint: all ranks",
    on_all_ranks=True,
    backends=BACKENDS,
)
def test_gathers_another_type(rank: int, made: SMDDPStrategy) -> None:
    made.gather(ops.ones((3, 2), "int32" if rank else "float32"))


@fails("rank 0: rows of float32[2, 3]; rank 1: rows of float32[3, 2]", on_all_ranks=True)
def test_gathers_another_shape(rank: int, made: SMDDPStrategy) -> None:
    made.gather(np.ones((2, 3, 2) if rank else (2, 2, 3), np.float32))


@fails(
    "broadcast: ranks disagree: rank 0: array 1 is float32[4]; rank 1: array 1 is int32[4]. Hint: ",
    on_all_ranks=True,
    backends=BACKENDS,
)
def test_broadcasts_another_type(rank: int, made: SMDDPStrategy) -> None:
    second = np.ones(4, "int32" if rank else "float32")
    made.broadcast_variables(
        [keras.Variable(each, trainable=False, dtype=each.dtype) for each in (np.ones(2), second)]
    )


@fails("rank 0: array 0 is float32[2, 6]; rank 1: array 0 is float32[3, 4]", on_all_ranks=True)
def test_broadcasts_another_shape(rank: int, made: SMDDPStrategy) -> None:
    made.broadcast_variables([keras.Variable(np.ones((3, 4) if rank else (2, 6), np.float32))])


@fails("train_on_batch(): rank 1 has called test_on_batch(). Hint: call the same")
def test_another_method_at_first(rank: int, made: SMDDPStrategy) -> None:
    model = compiled(made)
    (model.test_on_batch if rank else model.train_on_batch)(*arrays())


@fails("test_on_batch(): rank 1 has called predict_on_batch(). Hint: call the same")
def test_another_method_later(rank: int, made: SMDDPStrategy) -> None:
    model = compiled(made)
    model.train_on_batch(*arrays())
    if rank:
        model.predict_on_batch(arrays()[0])
    else:
        model.test_on_batch(*arrays())


@on_ranks(2)
def test_errors_of_a_step_get_the_name_of_the_method(rank: int, world: int) -> None:
    asked: list[str] = []
    with strategy() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(made._context.backend, "error_of_step", asked.append)
        model, names = compiled(made), ["train_on_batch", "test_on_batch", "predict_on_batch"]
        for name in names:
            error_of(getattr(model, name))  # without data
    assert asked == names


@on_ranks(1, ["jax"])
def test_what_orders_collectives_is_zero(rank: int, world: int) -> None:
    """Gradients are multiplied by one plus it, whatever the weights that it has to wait for."""
    import jax

    from sdp_plugins.jax.collectives import after

    weights = [np.full(2, value, np.float32) for value in (np.inf, np.nan, 3e38, 3e38)]
    assert float(jax.jit(after)(np.float32(0), weights)) == 0
