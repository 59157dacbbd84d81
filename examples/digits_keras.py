"""Trains on handwritten digits with Keras, in one process and under the strategy; compares them.

    python examples/digits_keras.py                    # on all three backends
    sdp run -n 2 examples/digits_keras.py --train jax  # what that starts

The digits are scikit-learn's: 1797 handwritten digits of 8 x 8 pixels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

BACKENDS = ("tensorflow", "torch", "jax")
MARK = "result: "


def train(backend: str, epochs: int) -> dict[str, float]:
    """A model as a program would define it."""
    import keras
    from sklearn.datasets import load_digits

    import sdp_plugins.keras as sdp

    keras.utils.set_random_seed(1)
    x, y = load_digits(return_X_y=True)
    x = (x / 16).reshape(-1, 8, 8, 1).astype("float32")

    strategy = sdp.SMDDPStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(
        x[:1500], y[:1500], batch_size=64, epochs=epochs, shuffle=False, verbose=0
    ).history  # batch_size is that of all ranks together
    loss, accuracy = model.evaluate(x[1500:], y[1500:], verbose=0)
    strategy.close()
    return {"training loss": history["loss"][-1], "test loss": loss, "test accuracy": accuracy}


def compare(epochs: int) -> None:
    """One process and two, on every backend."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"digits, {epochs} epochs: one process and two ranks of the same batch")
    for name in ("backend", "processes", "training loss", "test loss", "test accuracy"):
        table.add_column(name, justify="right")
    for backend in BACKENDS:
        for ranks in (1, 2):
            print(f"{backend}, {ranks} process{'es' * (ranks > 1)} ...", flush=True)
            found = start(backend, ranks, epochs)
            table.add_row(backend, str(ranks), *(f"{value:.6f}" for value in found.values()))
    Console(width=100).print(table)


def start(backend: str, ranks: int, epochs: int) -> dict[str, Any]:
    """Run this file by ``sdp run``; the result of rank 0."""
    sdp = Path(sys.executable).with_name("sdp")
    command = [str(sdp), "run", "-n", str(ranks), __file__, "--train", backend]
    done = subprocess.run(
        [*command, "--epochs", str(epochs)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise typer.Exit(done.returncode)
    line = next(line for line in done.stdout.splitlines() if MARK in line)
    return dict(json.loads(line.split(MARK, 1)[1]))


def main(
    backend: Annotated[str, typer.Option("--train", help="train here, on this backend")] = "",
    epochs: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Compare all, or train."""
    if not backend:
        compare(epochs)
        return
    os.environ.update(KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3", JAX_PLATFORMS="cpu")
    found = train(backend, epochs)
    if os.environ.get("RANK", "0") == "0":
        print(MARK + json.dumps(found))


if __name__ == "__main__":
    typer.run(main)
