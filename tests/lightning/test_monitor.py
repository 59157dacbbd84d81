"""`SMDDPMonitor` logs to the Trainer's loggers, in both Lightning packages."""

from __future__ import annotations

import csv
import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import sdp_plugins.lightning
from sdp_plugins.lightning.namespaces import strategy_class
from tests.lightning.cases import case
from tests.lightning.models import PACKAGES, loader, model, trainer
from tests.ranks import HANG_S, Pool

KEYS = {
    *("smddp/communication_share", "smddp/waiting_share"),
    *("smddp/bytes_per_second", "smddp/straggler"),
}


@case
def fit_logged(
    rank: int, world: int, package: str, folder: str, every: int, strategy: str, batches: int = 1
) -> list[dict[str, str]]:
    """Rank 1 takes longer in each batch; what rank 0 logs."""
    lightning = importlib.import_module(package)

    class Slow(lightning.callbacks.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            time.sleep(0.05 * (rank == 1))

    logger = importlib.import_module(f"{package}.loggers").CSVLogger(
        folder, flush_logs_every_n_steps=1
    )
    t = trainer(
        package,
        strategy=strategy,
        logger=logger,
        log_every_n_steps=every,
        accumulate_grad_batches=batches,
        callbacks=[sdp_plugins.lightning.SMDDPMonitor(), Slow()],
        enable_checkpointing=False,
    )
    t.fit(model(package), loader())
    if rank:
        return []
    with open(Path(logger.log_dir, "metrics.csv")) as file:
        return [row for row in csv.DictReader(file) if row.get("smddp/straggler")]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("strategy", ["smddp", "smddp_sharded"])
def test_what_is_logged(rank_pool: Pool, tmp_path: Path, package: str, strategy: str) -> None:
    rows, _ = rank_pool(2).run(fit_logged, package, str(tmp_path), 2, strategy)
    assert [row["step"] for row in rows] == ["1", "3"]  # of four batches, where Lightning logs, too
    for row in rows:
        assert {*row} >= KEYS
        assert float(row["smddp/straggler"]) == 1
        waiting = float(row["smddp/waiting_share"])
        assert 0.1 < waiting <= float(row["smddp/communication_share"]) <= 1
        assert float(row["smddp/bytes_per_second"]) > 0


@pytest.mark.parametrize("package", PACKAGES)
def test_a_step_of_several_batches_is_logged_once(
    rank_pool: Pool, tmp_path: Path, package: str
) -> None:
    rows, _ = rank_pool(2).run(fit_logged, package, str(tmp_path), 1, "smddp", 2)
    assert [row["step"] for row in rows] == ["0", "1"]
    assert all(float(row["smddp/bytes_per_second"]) > 0 for row in rows)


@pytest.mark.parametrize("package", PACKAGES)
def test_without_smddp_nothing_is_logged(tmp_path: Path, package: str) -> None:
    loggers = importlib.import_module(f"{package}.loggers")
    monitor: Any = strategy_class(package, "SMDDPMonitor")()
    logger = loggers.CSVLogger(str(tmp_path))
    one = {"strategy": "auto", "devices": 1, "logger": logger, "log_every_n_steps": 1}
    trainer(package, callbacks=[monitor], **one).fit(model(package), loader())
    assert "smddp" not in Path(logger.log_dir, "metrics.csv").read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_it_is_a_callback_of_the_package_that_is_imported_later(package: str) -> None:
    script = (
        "from sdp_plugins.lightning import SMDDPMonitor\n"
        f"from {package} import callbacks\n"
        "assert isinstance(SMDDPMonitor(), callbacks.Callback)\n"
    )
    line = [sys.executable, "-c", script]
    subprocess.run(line, check=True, timeout=HANG_S)
