"""Programs that differ between ranks, or misuse the strategy, end with an error that says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from sdp_plugins.core import CollectiveMismatchError, PeerLostError
from sdp_plugins.keras import SMDDPStrategy, rank_consistency
from tests.faults import gave_up, stay_away
from tests.keras.first_ranks import BACKENDS, on_ranks
from tests.keras.models import BATCH, arrays, crossentropy, dense
from tests.keras.strategies import compiled, error_of, fails, strategy, values

# ---- other models ----------------------------------------------------------------------------


@fails("rank 1 has another model: ", "first/kernel float32[6, 4] there")
def test_other_layers(rank: int, made: SMDDPStrategy) -> None:
    with made.scope():
        first = layers.Dense(3 + rank, name="first")
        model = keras.Sequential([keras.Input((6,)), first, layers.Dense(3)])
        model.compile("sgd", "mse")
    model.fit(np.zeros((8, 6)), np.zeros((8, 3)), verbose=0)


@fails("rank 1 has another model: ", "/kernel float32[6, 8] (not trained) there")
def test_frozen_on_one_rank(rank: int, made: SMDDPStrategy) -> None:
    with made.scope():
        model = dense()
        model.layers[0].trainable = rank == 0
        model.compile("sgd", crossentropy())
    model.fit(*arrays(), verbose=0)


@fails("rank 1 has another model: ", "Hint: build and compile the same")
def test_other_optimizer(rank: int, made: SMDDPStrategy) -> None:
    compiled(made, optimizer="adam" if rank == 1 else "sgd").fit(*arrays(), verbose=0)


@fails("rank 1 has another model: SGD momentum=0.75 there, SGD momentum=0.5 here")
def test_other_settings(rank: int, made: SMDDPStrategy) -> None:
    optimizer = keras.optimizers.SGD(momentum=0.5 + rank / 4)
    compiled(made, optimizer=optimizer).fit(*arrays(), verbose=0)


@fails("rank 1 has another model: SGD learning_rate=", '"decay_steps": 11')
def test_other_schedule(rank: int, made: SMDDPStrategy) -> None:
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10 + rank, 0.5)
    compiled(made, optimizer=keras.optimizers.SGD(rate)).fit(*arrays(), verbose=0)


# ---- other calls -----------------------------------------------------------------------------


@fails("fit(): rank 1 has called evaluate()")
def test_other_call(rank: int, made: SMDDPStrategy) -> None:
    model = compiled(made)
    (model.fit if rank == 0 else model.evaluate)(*arrays(), verbose=0)


@fails("did not arrive in 1.5 s", "all ranks must call evaluate()")
def test_only_rank_0_evaluates(rank: int, made: SMDDPStrategy) -> None:
    """The other one is busy elsewhere until rank 0 has given up."""
    model = compiled(made)
    model.fit(*arrays(), verbose=0)
    if rank == 1:
        return stay_away(1, 2)
    made.group.timeout_s = 1.5
    try:
        model.evaluate(*arrays(), verbose=0)
    finally:
        gave_up()


@fails(
    "PeerLostError: [rank 0 in group keras (ranks 0, 1)] all_gather",
    "all ranks must call evaluate()",
)
def test_rank_1_ends_instead(rank: int, made: SMDDPStrategy) -> None:
    """As a script whose last lines are for rank 0 only."""
    model = compiled(made)
    model.fit(*arrays(), verbose=0)
    if rank == 0:
        model.evaluate(*arrays(), verbose=0)


@fails(
    "fit(): rank 1 has stopped after step 2 of epoch 1 (stop_training is set there); others "
    "go on with epoch 1. Hint: give all ranks the same callbacks",
    on_all_ranks=True,
    backends=BACKENDS,
)
def test_stops_early(rank: int, made: SMDDPStrategy) -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if rank == 1 and batch == 1:
                self.model.stop_training = True

    compiled(made).fit(*arrays(), batch_size=4, verbose=0, callbacks=[Stop()])


@fails("fit(): rank 0 has stopped after epoch 2", "rank 1 goes on. Hint: ", on_all_ranks=True)
def test_stops_after_an_epoch(rank: int, made: SMDDPStrategy) -> None:
    """As a callback that only one rank has."""
    stop = keras.callbacks.EarlyStopping("loss", min_delta=9.0)
    callbacks = [stop] if rank == 0 else []
    compiled(made).fit(*arrays(), epochs=5, verbose=0, callbacks=callbacks)


@fails(
    "fit(): rank 0 has ended it, and others have called it again. Hint: call the same methods",
    on_all_ranks=True,
    backends=BACKENDS,
)
def test_trains_again_on_one_rank(rank: int, made: SMDDPStrategy) -> None:
    model = compiled(made)
    model.fit(*arrays(), epochs=3, verbose=0)
    if rank == 0:
        model.evaluate(*arrays(), verbose=0)
    else:
        model.fit(*arrays(), epochs=3, verbose=0)


def failing_on_rank_1(rank: int, made: SMDDPStrategy) -> Any:
    """A model whose training raises an error on rank 1."""

    class Model(keras.Sequential):
        def train_step(self, *args: Any) -> Any:
            if rank == 1:
                raise ArithmeticError("the third layer is tired")
            return super().train_step(*args)

    with made.scope():
        model = Model([keras.Input((6,)), layers.Dense(3)])
        model.compile("sgd", crossentropy())
    return model


@on_ranks(2, BACKENDS)
def test_rank_1_raises(rank: int, world: int) -> None:
    with strategy() as made:
        model = failing_on_rank_1(rank, made)
        text = error_of(lambda: model.fit(*arrays(), verbose=0))
    assert "tired" in text
    assert rank == 1 or "rank 1 gave up: ArithmeticError: the third layer is tired" in text, text


@on_ranks(2)
def test_a_call_after_a_failure(rank: int, world: int) -> None:
    """It repeats the failure, with all that is known about it."""
    with strategy() as made:
        model = failing_on_rank_1(rank, made)
        error_of(lambda: model.fit(*arrays(), verbose=0))
        with pytest.raises(PeerLostError) as caught:
            model.evaluate(*arrays(), verbose=0)
    error, text = caught.value, str(caught.value)
    assert (error.kind, error.origin_rank, error.is_repeat) == ("aborted", 1, True)
    assert text.count("[rank ") == 1, text
    assert "ArithmeticError: the third layer is tired" in text
    assert "must call" not in text


# ---- other data ------------------------------------------------------------------------------


@fails(
    "fit(): rank 1 has stopped after step 2 of epoch 1 (its data has ended); others go on",
    on_all_ranks=True,
    backends=BACKENDS,
)
def test_shorter_data(rank: int, made: SMDDPStrategy) -> None:
    x, y = arrays()

    def batches() -> Iterator[Any]:
        for begin in range(0, 24 - 8 * rank, 8):
            yield x[begin : begin + 8], y[begin : begin + 8]

    compiled(made).fit(batches(), verbose=0)


@fails("rank 1 reads other batches. Hint: ", backends=BACKENDS)
def test_shuffled_without_a_seed(rank: int, made: SMDDPStrategy) -> None:
    x, y = arrays()
    order = np.random.default_rng(rank).permutation(len(x))
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        data: Any = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(BATCH)
    else:

        class Source(keras.utils.PyDataset):
            def __len__(self) -> int:
                return 3

            def __getitem__(self, index: int) -> Any:
                rows = order[BATCH * index : BATCH * index + BATCH]
                return x[rows], y[rows]

        data = Source()
    compiled(made).fit(data, verbose=0)


@on_ranks(2, ["tensorflow"])
def test_the_method_of_other_batches(rank: int, world: int) -> None:
    import tensorflow as tf

    x, y = arrays()
    data = tf.data.Dataset.from_tensor_slices((x + rank, y)).batch(BATCH)
    with strategy() as made:
        model = compiled(made)
        with pytest.raises(CollectiveMismatchError, match="rank 1 reads other batches") as caught:
            model.evaluate(data, verbose=0)
    assert (caught.value.op, caught.value.ranks) == ("evaluate", (1,))


@fails("rank 1 has passed other arrays than this one", "each takes its part")
def test_own_arrays(rank: int, made: SMDDPStrategy) -> None:
    """As where each rank is to read a part."""
    x, y = arrays()
    compiled(made).fit(x[rank::2], y[rank::2], verbose=0)


@fails("rank 1 has passed other arrays than this one")
def test_other_targets(rank: int, made: SMDDPStrategy) -> None:
    x, y = arrays()
    y[len(y) // 2] = rank
    compiled(made).fit(x, y, verbose=0)


@fails("rank 1 gave up: ValueError: Data cardinality is ambiguous")
def test_bad_data_on_one_rank(rank: int, made: SMDDPStrategy) -> None:
    x, y = arrays()
    compiled(made).fit(x, y, validation_data=(x, y[: len(y) - rank]), verbose=0)


# ---- assignments on one rank -----------------------------------------------------------------


def assign(model: Any) -> None:
    """Change one element of the last kernel."""
    kernel = model.layers[-1].kernel
    value = ops.convert_to_numpy(kernel).copy()
    value[-1, -1] += 1e-2 if keras.backend.backend() == "jax" else 1e-6  # JAX may round
    kernel.assign(value)


class Assigns(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            assign(self.model)


class SetsRate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.optimizer.learning_rate = 0.5


@fails(
    "fit(): rank 1 has other values than rank 0 after epoch 2, first in ",
    "/kernel'. Hint: assign and load weights on all ranks alike, also in callbacks; or",
    on_all_ranks=True,
    backends=BACKENDS,
)
def test_assigns_on_rank_0(rank: int, made: SMDDPStrategy) -> None:
    callbacks = [Assigns()] if rank == 0 else []
    compiled(made).fit(*arrays(), epochs=4, verbose=0, callbacks=callbacks)


@fails("rank 1 has other values than rank 0 after epoch 2", "learning_rate'", on_all_ranks=True)
def test_sets_rate_on_rank_0(rank: int, made: SMDDPStrategy) -> None:
    callbacks = [SetsRate()] if rank == 0 else []
    compiled(made).fit(*arrays(), epochs=4, verbose=0, callbacks=callbacks)


@fails(
    "train_on_batch(): rank 1 has other values than rank 0, first in ",
    "/kernel'. Hint: assign and load weights on all ranks alike",
    on_all_ranks=True,
    backends=BACKENDS,
)
def test_assigns_between_batches(rank: int, made: SMDDPStrategy) -> None:
    model = compiled(made)
    model.train_on_batch(*arrays())
    if rank == 1:
        assign(model)
    model.train_on_batch(*arrays())


@on_ranks(2)
def test_assigns_in_a_large_model(rank: int, world: int) -> None:
    """Batches compare a part of the weights in turn, so several may pass before the error."""
    with pytest.MonkeyPatch.context() as patch, strategy() as made:
        patch.setattr(rank_consistency, "ELEMENTS_OF_A_BATCH", 20)
        model = compiled(made)
        model.predict_on_batch(arrays()[0])
        if rank == 1:
            assign(model)
        parts = -(-sum(each.size for each in values(model)) // 20)
        texts = [error_of(model.predict_on_batch, arrays()[0]) for _ in range(parts)]
        first = next(text for text in texts if text != "none")
    assert texts[0] == "none"
    assert "predict_on_batch(): rank 1 has other values than rank 0, first in " in first, first


@fails("evaluate(): rank 1 has other values than rank 0", "/kernel'. Hint: ", on_all_ranks=True)
def test_assigns_before_an_evaluation(rank: int, made: SMDDPStrategy) -> None:
    model = compiled(made)
    model.fit(*arrays(), verbose=0)
    if rank == 0:
        assign(model)
    model.evaluate(*arrays(), verbose=0)


@fails("predict(): rank 1 has other values than rank 0", "/kernel'. Hint: ", on_all_ranks=True)
def test_assigns_before_a_prediction(rank: int, made: SMDDPStrategy) -> None:
    model = compiled(made)
    model.predict(arrays()[0], verbose=0)
    if rank == 1:
        assign(model)
    model.predict(arrays()[0], verbose=0)


# ---- misuse on all ranks ---------------------------------------------------------------------


@fails(
    "RuntimeError: optimizer 'own' is not an attribute of the model",
    "Hint: make it before the first call, and assign it to an attribute of the model",
    on_all_ranks=True,
    backends=["torch", "tensorflow"],
)
def test_optimizer_outside_of_the_model(rank: int, made: SMDDPStrategy) -> None:
    own = keras.optimizers.SGD(0.1, name="own")

    class Model(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            ones = [ops.ones(each.shape) for each in self.trainable_variables]
            own.apply(ones, self.trainable_variables)
            return {}

    with made.scope():
        model = Model([keras.Input((6,)), layers.Dense(3)])
        model.compile("sgd", crossentropy())
    own.build(model.trainable_variables)
    model.train_on_batch(*arrays())


@fails(
    "is compiled with SparseCategoricalCrossentropy(reduction=None)",
    "Hint: use",
    on_all_ranks=True,
)
def test_loss_without_reduction(rank: int, made: SMDDPStrategy) -> None:
    compiled(made, loss=crossentropy(reduction=None)).fit(*arrays(), verbose=0)


@fails("compiled outside of it", "with strategy.scope():")
def test_compiled_outside(rank: int, made: SMDDPStrategy) -> None:
    with made.scope():
        model = dense()
    model.compile("sgd", crossentropy())
    model.fit(*arrays(), verbose=0)


@fails("inside of the scope of another")
def test_scope_in_scope(rank: int, made: SMDDPStrategy) -> None:
    other = SMDDPStrategy(made.group)
    with made.scope(), other.scope():
        pass


@fails("belongs to another strategy")
def test_two_strategies(rank: int, made: SMDDPStrategy) -> None:
    model = compiled(made)
    with SMDDPStrategy(made.group).scope():
        model.compile("sgd", "mse")


@fails("ValueError: layer 'keeps' is stateful", "stateful=False")
def test_stateful_layer(rank: int, made: SMDDPStrategy) -> None:
    with made.scope():
        model = keras.Sequential(
            [keras.Input((4, 2), batch_size=8), layers.LSTM(3, stateful=True, name="keeps")]
        )
        model.compile("sgd", "mse")
    model.fit(np.zeros((8, 4, 2)), np.zeros((8, 3)), batch_size=8, verbose=0)


@on_ranks(2, BACKENDS)
def test_a_closed_group(rank: int, world: int) -> None:
    """A compiled step that outlives its strategy."""
    with strategy() as made:
        model = compiled(made)
        model.fit(*arrays(), verbose=0)
    text = error_of(lambda: model.fit(*arrays(), verbose=0))
    assert "closed" in text, text
