"""`smddp_elastic`: trainings whose ranks are lost, and joined by others."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from tests import elastic_trainings
from tests.elastic_trainings import net, optimizers, same
from tests.faults import die
from tests.launch.jobs import launch_page
from tests.ranks import Start, say

pytestmark = pytest.mark.timeout(600)
PACKAGE = "lightning.pytorch"
importlib.import_module(PACKAGE)  # once for all ranks, which are forked
SAMPLES, EPOCHS, BATCH, DECAY_STEPS = 107, 3, 8, 9
Before = Callable[[str, int], None]


data = partial(elastic_trainings.data, SAMPLES)


def module(package: str, seed: int, before: Before) -> Any:
    """A LightningModule that notes which samples it has used in which step."""
    lightning: Any = importlib.import_module(package)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(seed)
            self.taken: dict[int, list[int]] = {}
            self.sizes: dict[int, int] = {}
            self.current: list[int] = []
            self.hooks: list[str] = []
            self.one = lambda: 1.0

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            x, y, self.current = batch[0], batch[1], [*self.current, *batch[2].tolist()]
            before("forward", self.global_step)
            loss = functional.cross_entropy(self.net(x), y)
            before("backward", self.global_step)
            self.log("train_loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            self.log("train_one", 1.0, sync_dist=True, on_step=False, on_epoch=True)
            self.log("train_batches", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)
            return loss

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            number, size = self.global_step, self.trainer.world_size
            super().optimizer_step(*args, **kwargs)
            self.taken[number], self.current = self.current, []
            self.sizes[number] = size
            before("taken", number)

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            before("validation", self.global_step)
            self.log("val_loss", functional.cross_entropy(self.net(batch[0]), batch[1]).float())
            self.log("one", self.one(), sync_dist=True)
            self.log("val_batches", 1.0, reduce_fx="sum")

        def on_train_batch_start(self, batch: list[Tensor], index: int) -> None:
            if index % self.trainer.accumulate_grad_batches == 0:
                self.current = []

        def on_validation_epoch_end(self) -> None:
            self.hooks.append(f"validated {self.current_epoch}")

        def on_train_epoch_start(self) -> None:
            self.hooks.append(f"epoch {self.current_epoch}")

        def on_train_epoch_end(self) -> None:
            before("epoch end", self.global_step)

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = optimizers(self.parameters(), DECAY_STEPS)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Module()


class Job:
    """A Trainer on one rank, and its module."""

    def __init__(
        self,
        rank: int,
        world: int,
        folder: Path,
        before: Before = lambda where, step: None,
        package: str = PACKAGE,
        **options: Any,
    ) -> None:
        lightning: Any = importlib.import_module(package)
        workers = options.pop("workers", 0)
        self.module = module(package, rank, before)
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world,
            strategy="smddp_elastic",
            max_epochs=EPOCHS,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        self.loaders = (
            DataLoader(data(), BATCH, shuffle=True, num_workers=workers),
            DataLoader(data(), 64),
        )

    def fit(self) -> dict[str, Any]:
        self.trainer.fit(self.module, *self.loaders)
        weights = [parameter.detach().numpy() for parameter in self.module.parameters()]
        kept = self.trainer.optimizers[0].state_dict()["state"][0]["exp_avg"].numpy()
        self.trainer.strategy.close()  # kept processes run other tests
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        return {
            "weights": [*weights, kept],
            "taken": self.module.taken,
            "sizes": self.module.sizes,
            "hooks": self.module.hooks,
            "metrics": metrics,
            "epoch": self.trainer.current_epoch,
            "steps": self.trainer.global_step,
        }


def check(results: list[dict[str, Any]]) -> None:
    """What must hold; those who have come to the end have come there together."""
    for other in results[1:]:
        assert other.get("epoch", EPOCHS) == EPOCHS
        assert other.get("steps", results[0]["steps"]) == results[0]["steps"]
    steps: dict[int, list[int]] = {}
    for result in results:
        for number, indices in result["taken"].items():
            steps.setdefault(number, []).extend(indices)
    assert sorted(steps) == list(range(results[0]["steps"]))
    elastic_trainings.check(results, steps, SAMPLES, EPOCHS, DECAY_STEPS)


def train(rank: int, world: int, folder: Path, package: str) -> dict[str, Any]:
    return Job(rank, world, folder, package=package).fit()


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_equals_one_process(start_pooled: Start, tmp_path: Path, package: str) -> None:
    with start_pooled(3, train, tmp_path, package) as ranks:
        results = ranks.results()
    check(results)
    assert results[0]["hooks"][1:] == [
        text for epoch in range(EPOCHS) for text in (f"epoch {epoch}", f"validated {epoch}")
    ]


def train_and_lose(
    rank: int, world: int, folder: Path, victim: int, where: str, at: int, workers: int
) -> dict[str, Any]:
    def before(here: str, step: int) -> None:
        if (rank, here) == (victim, where) and step >= at:
            say((job.module.taken, job.module.current))
            die()

    job = Job(rank, world, folder, before, workers=workers)
    return job.fit()


@pytest.mark.parametrize(
    ("victim", "where", "workers"),
    [
        (0, "forward", 0),
        (2, "backward", 2),
        (1, "taken", 0),
        (0, "validation", 0),
        (2, "epoch end", 0),
    ],
)
def test_a_rank_is_lost(
    start_pooled: Start, tmp_path: Path, victim: int, where: str, workers: int
) -> None:
    """The others go on in the epoch, and each hook of theirs is called as often as without."""
    with start_pooled(3, train_and_lose, tmp_path, victim, where, 6, workers) as ranks:
        taken, current = ranks[victim].heard()
        results = [ranks[rank].result() for rank in range(3) if rank != victim]
    if where in ("forward", "backward") and results[0]["sizes"][6] == 3:
        taken[6] = current  # the others had all that they needed of it
    check([*results, {"weights": results[0]["weights"], "taken": taken}])
    for result in results:
        assert [hook for hook in result["hooks"] if hook.startswith("epoch")] == [
            f"epoch {epoch}" for epoch in range(EPOCHS)
        ]
        logged = {"train_loss", "train_one", "train_batches", "val_loss", "one", "val_batches"}
        assert result["metrics"].keys() == logged
        assert result["metrics"]["train_one"] == result["metrics"]["one"] == 1.0


def train_and_raise(rank: int, world: int, folder: Path) -> dict[str, Any]:
    def before(here: str, step: int) -> None:
        if (rank, here, step) == (0, "backward", 6):
            say((job.module.taken, job.module.current))
            raise ArithmeticError("a fault of the model")

    job = Job(rank, world, folder, before)
    return job.fit()


def test_an_error_of_the_program_ends_its_rank(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(3, train_and_raise, tmp_path) as ranks:
        taken, _ = ranks[0].heard()
        with pytest.raises(ArithmeticError, match="a fault of the model"):
            ranks[0].result()
        results = [ranks[rank].result() for rank in (1, 2)]
    check([*results, {"weights": results[0]["weights"], "taken": taken}])


def train_and_lose_two(rank: int, world: int, folder: Path) -> dict[str, Any]:
    def before(here: str, step: int) -> None:
        if here == "forward" and step == 6 + rank and rank < 2:
            say((job.module.taken, job.module.current))
            die()

    job = Job(rank, world, folder, before)
    return job.fit()


def test_ranks_are_lost_one_after_the_other(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(3, train_and_lose_two, tmp_path) as ranks:
        lost = [ranks[rank].heard()[0] for rank in range(2)]
        result = ranks[2].result()
    check([result, *({"weights": result["weights"], "taken": taken} for taken in lost)])


def accumulate(rank: int, world: int, folder: Path) -> dict[str, Any]:
    def before(here: str, step: int) -> None:
        if (rank, here, step) == (1, "forward", 2) and len(job.module.current) > 2 * BATCH:
            say(job.module.taken)
            die()

    job = Job(rank, world, folder, before, accumulate_grad_batches=3)
    return job.fit()


def test_a_step_of_several_batches_is_repeated_from_the_first(
    start_pooled: Start, tmp_path: Path
) -> None:
    with start_pooled(3, accumulate, tmp_path) as ranks:
        taken = ranks[1].heard()
        results = [ranks[rank].result() for rank in (0, 2)]
    results.append({"weights": results[0]["weights"], "taken": taken})
    flat = [index for result in results for step in result["taken"].values() for index in step]
    assert sorted(flat) == sorted(list(range(SAMPLES)) * EPOCHS)
    same(results)


def lead_or_join(
    rank: int, world: int, folder: Path, starting: int, at: int, every: int | None
) -> dict[str, Any]:
    """Ranks from `starting` on join when rank 0 has come to a step."""
    told = folder / "handles"
    if rank < starting:
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(starting))
    else:
        while not told.exists():
            time.sleep(0.01)
        os.environ["SDP_JOIN"] = told.read_text()

    def before(here: str, step: int) -> None:
        if (here, step, rank) == ("forward", at, 0) and not told.exists():
            participant = job.trainer.strategy.ranks._participant
            (folder / "new").write_text(",".join(map(str, participant.roster.handles)))
            (folder / "new").rename(told)
            while participant.waiting() < world - starting:
                time.sleep(0.001)

    checkpoint = importlib.import_module(f"{PACKAGE}.callbacks").ModelCheckpoint(
        monitor="val_loss", save_top_k=2, filename="{step}", every_n_train_steps=every
    )
    devices = starting if rank < starting else world
    job = Job(rank, devices, folder, before, callbacks=[checkpoint])
    try:
        return job.fit() | {"best": sorted(checkpoint.best_k_models), "folder": checkpoint.dirpath}
    finally:
        os.environ.pop("SDP_JOIN", None)


@pytest.mark.parametrize("starting", [1, 2])
def test_others_join(start_pooled: Start, tmp_path: Path, starting: int) -> None:
    """They begin where the others are, with all that a checkpoint has."""
    with start_pooled(3, lead_or_join, tmp_path, starting, 5, None) as ranks:
        results = ranks.results()
    check(results)
    for newcomer in results[starting:]:
        assert 0 < min(newcomer["taken"]) <= 8
        assert newcomer["best"] == results[0]["best"] and len(newcomer["best"]) == 2
        assert newcomer["folder"] == results[0]["folder"]


def test_one_that_joins_saves_with_the_others(start_pooled: Start, tmp_path: Path) -> None:
    """By a metric of the epoch before, in which it was not there."""
    with start_pooled(3, lead_or_join, tmp_path, 2, 10, 3) as ranks:
        results = ranks.results()
    check(results)
    assert [result["best"] for result in results] == [results[0]["best"]] * 3
    assert min(results[2]["taken"]) > 7


def repeat_a_part(
    rank: int, world: int, folder: Path, victim: int, where: str, drop: bool
) -> dict[str, Any]:
    """A rank is lost in a validation, or while it saves."""
    callbacks: Any = importlib.import_module(f"{PACKAGE}.callbacks")

    class Checkpoint(callbacks.ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            if rank == 0 and where == "save" and trainer.current_epoch == 1:
                Path(filepath).write_text("torn")
                die()
            super()._save_checkpoint(trainer, filepath)

    def before(here: str, step: int) -> None:
        now = ("first", "second", "third")[job.trainer.current_epoch] + f" {here}"
        if step > 0 and (rank, now) == (victim, where):
            die()

    checkpoint = Checkpoint(monitor="one", mode="max", save_top_k=1, filename="{epoch}")
    stopping = callbacks.EarlyStopping(monitor="one", patience=2)
    job = Job(rank, world, folder, before, callbacks=[stopping, checkpoint])
    if drop:  # with fewer ranks, one step more
        job.loaders = (DataLoader(data(), 9, shuffle=True, drop_last=True), job.loaders[1])
    job.module.one = lambda: 1.0 + job.trainer.current_epoch * (where == "save")
    result = job.fit()
    return result | {"best": checkpoint.best_model_path, "waited": stopping.wait_count}


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(
    ("victim", "where"), [(1, "first validation"), (0, "second validation"), (0, "save")]
)
def test_callbacks_see_a_repeated_part_once(
    start_pooled: Start, tmp_path: Path, victim: int, where: str, drop: bool
) -> None:
    """Also if other ranks have other numbers of batches, and what one has saved is torn."""
    with start_pooled(3, repeat_a_part, tmp_path, victim, where, drop) as ranks:
        results = [ranks[rank].result() for rank in range(3) if rank != victim]
    same(results)
    for result in results:
        assert result["epoch"] == EPOCHS
        assert result["waited"] == 2 and result["metrics"]["one"] == (3 if where == "save" else 1)
        saved = torch.load(result["best"], weights_only=False)
        assert saved["epoch"] == (2 if where == "save" else 0)


def count_batches(rank: int, world: int, folder: Path) -> list[float]:
    """A rank is lost in a validation in the middle of an epoch."""
    callbacks: Any = importlib.import_module(f"{PACKAGE}.callbacks")
    counts: list[float] = []

    class Counts(callbacks.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self.batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.batches += 1

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            counts.append(float(trainer.callback_metrics["val_batches"]))

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            counts.append(float(trainer.callback_metrics["train_batches"]) / self.batches)

    def before(here: str, step: int) -> None:
        if (rank, here, job.trainer.current_epoch) == (1, "validation", 1):
            die()

    options = {"val_check_interval": 0.5, "num_sanity_val_steps": 0}
    job = Job(rank, world, folder, before, callbacks=[Counts()], **options)
    job.fit()
    return counts


def test_metrics_count_a_repeated_validation_once(start_pooled: Start, tmp_path: Path) -> None:
    """And all that was logged in the epoch before it."""
    with start_pooled(3, count_batches, tmp_path) as ranks:
        counts = [ranks[rank].result() for rank in (0, 2)]
    assert {*counts[0], *counts[1]} == {1.0} and len(counts[0]) >= 3 * EPOCHS


# ---- mistakes ------------------------------------------------------------------------------------


def misuse(rank: int, world: int, folder: Path, what: str) -> str:
    job = Job(rank, world, folder)
    if what == "batch sampler":
        sampler = torch.utils.data.BatchSampler([0, 1], 2, False)
        job.loaders = (DataLoader(data(), batch_sampler=_Batches(sampler)), job.loaders[1])
    try:
        job.fit()
    except TypeError as error:
        return str(error)
    return ""


class _Batches(torch.utils.data.BatchSampler):
    def __init__(self, sampler: Any, batch_size: int = 2, drop_last: bool = False) -> None:
        super().__init__(range(4), batch_size, drop_last)


def test_batches_of_its_own_cannot_be_divided(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(1, misuse, tmp_path, "batch sampler") as ranks:
        assert "no batch_sampler of its own" in ranks[0].result()


def test_the_program_of_the_page_runs_as_written(tmp_path: Path) -> None:
    done = launch_page("elastic.md", tmp_path, ("--elastic", "1:2"), "fit.py")
    assert done.returncode == 0, done.stderr
    assert "`Trainer.fit` stopped: `max_epochs=5` reached." in done.stderr
