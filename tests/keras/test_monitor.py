"""`SMDDPMonitor` adds to the logs that other callbacks see."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import keras

from sdp_plugins.keras import SMDDPMonitor
from tests.keras.first_ranks import BACKENDS, on_ranks
from tests.keras.models import BATCH, arrays
from tests.keras.strategies import compiled, strategy

EPOCHS = 3
KEYS = {
    *("smddp/communication_share", "smddp/waiting_share"),
    *("smddp/bytes_per_second", "smddp/straggler"),
}


@on_ranks(2, BACKENDS)
def test_what_is_logged(rank: int, world: int, tmp_path: Path) -> None:
    path = tmp_path / f"{rank}.csv"
    batches: list[dict[str, Any]] = []

    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.3 * (rank == 1))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            batches.append(dict(logs))

    with strategy() as made:
        model = compiled(made)
        callbacks = [SMDDPMonitor(made), Slow(), keras.callbacks.CSVLogger(str(path))]
        history = model.fit(
            *arrays(), batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks
        )
    assert {*history.history} >= KEYS and all({*logs} >= KEYS for logs in batches)
    assert history.history["smddp/straggler"][-1] == 1  # the first compiles the model
    assert history.history["smddp/bytes_per_second"][-1] > 0
    waiting = history.history["smddp/waiting_share"][-1]
    assert waiting <= history.history["smddp/communication_share"][-1] <= 1
    assert waiting > 0.1 if rank == 0 else waiting < 0.5
    if rank == 0:
        with open(path) as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == EPOCHS and all({*row} >= KEYS for row in rows)
