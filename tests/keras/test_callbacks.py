"""Callbacks of Keras do on ranks what they do in one process."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.keras.first_ranks import BACKENDS, assert_same, environment, on_ranks
from tests.keras.models import BATCH, arrays
from tests.keras.strategies import compiled, strategy, values
from tests.ranks import HANG_S

LOAD = """
import sys, keras
keras.models.load_model(sys.argv[1]).predict(keras.ops.zeros((2, 6)), verbose=0)
assert 'sdp_plugins.keras' not in sys.modules
"""


@pytest.mark.versions
@on_ranks(2)
def test_rank_0_writes(rank: int, world: int, tmp_path: Path) -> Any:
    own = tmp_path / str(rank)
    own.mkdir()
    with strategy() as made:
        model = compiled(made)
        history = model.fit(
            *arrays(),
            epochs=2,
            validation_data=arrays(11),
            verbose=2,
            callbacks=[
                keras.callbacks.ModelCheckpoint(str(own / "model.keras")),
                keras.callbacks.CSVLogger(str(own / "log.csv")),
            ],
        )
        model.save(own / "saved.keras")  # the program's own doing
    files = sorted(path.name for path in own.iterdir())
    assert files == (["log.csv", "model.keras", "saved.keras"] if rank == 0 else ["saved.keras"])
    if rank == 0:
        subprocess.run(
            [sys.executable, "-c", LOAD, str(own / "model.keras")],
            env={"PATH": "/usr/bin:/bin", "SDP_AUTOLOAD": "0", **environment("jax")},
            check=True,
            timeout=HANG_S,
        )
    return history.history


@on_ranks(2, BACKENDS)
def test_rank_0_writes_for_a_callback_list(rank: int, world: int, tmp_path: Path) -> list[int]:
    """Twice by the same list, which stays the program's own; and by a list in a list."""
    own = tmp_path / str(rank)
    own.mkdir()
    epochs: list[int] = []
    count = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    with strategy() as made:
        model = compiled(made)
        for name in ("first", "second"):
            saves = keras.callbacks.ModelCheckpoint(str(own / f"{name}.keras"))
            both = keras.callbacks.CallbackList([saves, count], add_history=True, model=model)
            for _ in range(2):
                model.fit(*arrays(), verbose=0, callbacks=both if name == "first" else [both])
            assert len(both.callbacks) == 3
            assert both.callbacks[0] is saves
    files = sorted(path.name for path in own.iterdir())
    assert files == (["first.keras", "second.keras"] if rank == 0 else [])
    assert epochs == [0] * 4
    return epochs


@on_ranks(2, BACKENDS)
def test_callbacks_decide_alike(rank: int, world: int) -> Any:
    with strategy() as made:
        model = compiled(made, optimizer=keras.optimizers.SGD(3.0))
        history = model.fit(
            *arrays(),
            epochs=8,
            batch_size=BATCH,
            validation_data=arrays(11),
            verbose=0,
            callbacks=[
                keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
                keras.callbacks.ReduceLROnPlateau("val_loss", patience=1),
                keras.callbacks.TerminateOnNaN(),
            ],
        )
        assert len(history.history["loss"]) < 8
        return history.history, values(model)


@on_ranks(2, BACKENDS)
def test_nan_on_one_rank_ends_training_on_all(rank: int, world: int) -> None:
    x, y = arrays()
    x[9] = np.nan  # of the second batch of 8, rank 0's
    seen: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append(b))
    callbacks = [count, keras.callbacks.TerminateOnNaN()]
    with strategy() as made:
        compiled(made).fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    assert len(seen) == 2


@pytest.mark.versions
@on_ranks(2)
def test_backup_resumes_all_ranks(rank: int, world: int, tmp_path: Path) -> Any:
    """Training that was cut off after two of four epochs goes on, on all ranks."""

    class CutOff(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    def train(*callbacks: Any) -> tuple[Any, list[Any]]:
        with strategy() as made:
            model = compiled(made)
            history = model.fit(
                *arrays(), epochs=4, shuffle=False, verbose=0, callbacks=list(callbacks)
            )
            return history.epoch, values(model)

    def backup() -> Any:  # rank 0's disk is not the others'
        return keras.callbacks.BackupAndRestore(str(tmp_path / str(rank)), delete_checkpoint=False)

    with suppress(KeyboardInterrupt):
        train(backup(), CutOff())
    epochs, resumed = train(backup())
    _, whole = train()
    assert epochs == [2, 3]
    assert_same(resumed, whole, 0.0, "")
    return resumed


@on_ranks(2)
def test_all_ranks_may_read_what_rank_0_has_written(rank: int, world: int, tmp_path: Path) -> float:
    """As tutorials do: train with a checkpoint, then load the best weights on all ranks."""
    path = str(tmp_path / "best.weights.h5")
    with strategy() as made:
        model = compiled(made, keras.layers.Dense(1500), keras.layers.Dense(1500))
        for _ in range(3):
            saves = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
            model.fit(*arrays(), callbacks=[saves], verbose=0)
            model.load_weights(path)
        return float(model.evaluate(*arrays(), verbose=0)[0])
