"""The strategy smddp_local: ranks train by themselves between outer steps."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp_plugins.lightning.namespaces import strategy_class
from tests.lightning.cases import case
from tests.lightning.models import PACKAGES, digest, loader, model, trainer
from tests.ranks import Pool

ONE_OF_TWO = [PACKAGES[0], pytest.param(PACKAGES[1], marks=pytest.mark.long)]
FORMS = [{"every": 5}, {"every": 6, "fragments": 2, "delay": 2}]


@case
def fit(
    rank: int,
    world: int,
    package: str,
    form: dict[str, Any],
    folder: str = "",
    resumed: bool = False,
) -> tuple[str, str]:
    """Digests before the last outer step and after it; with a folder, of three epochs."""
    lightning = importlib.import_module(package)
    kind: Any = strategy_class(package, "SMDDPLocalStrategy")
    before = []

    class Strategy(kind):
        def on_train_end(self) -> None:
            before.append(digest(self.lightning_module))
            super().on_train_end()

    callbacks = []
    if folder:
        callbacks = [
            lightning.callbacks.ModelCheckpoint(
                folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True
            )
        ]
    made = trainer(
        package,
        strategy=Strategy(**form),
        callbacks=callbacks,
        enable_checkpointing=bool(folder),
        max_epochs=3,
    )
    trained = model(package)
    path = f"{folder}/epoch=0.ckpt" if resumed else None
    made.fit(trained, loader(), ckpt_path=path)
    return before[0], digest(trained)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("package", ONE_OF_TWO)
def test_a_training(rank_pool: Pool, package: str, form: dict[str, Any], tmp_path: Path) -> None:
    """Each rank trains by itself; at the end all are equal; a checkpoint continues exactly."""
    form = {"inner_ranks": 1, **form}
    whole = rank_pool(2).run(fit, package, form, str(tmp_path))
    (one, last), (other, its_last) = whole
    assert one != other and last == its_last
    names = {f"epoch={n}.ckpt{end}" for n in range(3) for end in ("", ".rank1")}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert rank_pool(2).run(fit, package, form, str(tmp_path), True) == whole


@case
def fit_by(rank: int, world: int, package: str, strategy: str) -> str:
    made = trainer(package, strategy=strategy, max_epochs=2)
    trained = model(package)
    made.fit(trained, loader())
    return digest(trained)


def test_on_one_node_it_is_smddp(rank_pool: Pool) -> None:
    local = rank_pool(2).run(fit_by, PACKAGES[0], "smddp_local")
    assert local == rank_pool(2).run(fit_by, PACKAGES[0], "smddp")


@case
def misuse(rank: int, world: int, package: str) -> None:
    lightning = importlib.import_module(package)
    kind: Any = strategy_class(package, "SMDDPLocalStrategy")
    trained = model(package)
    optimizers = [torch.optim.SGD(trained.parameters(), 0.1) for _ in range(2)]
    trained.automatic_optimization = False
    trained.configure_optimizers = lambda: optimizers
    with pytest.raises(ValueError, match=r"counts the steps of one optimizer.*returns 2"):
        trainer(package, strategy=kind()).fit(trained, loader())
    assert not dist.is_initialized()
    assert isinstance(kind(every=7), lightning.strategies.DDPStrategy)
    with pytest.raises(ValueError, match="inner_ranks=0: it must be an integer, at least 1"):
        kind(inner_ranks=0)
    with pytest.raises(ValueError, match=rf"inner_ranks={world + 1}: it must divide.* is {world}"):
        trainer(package, strategy=kind(inner_ranks=world + 1)).fit(model(package), loader())
    with pytest.raises(ValueError, match="Hint: say its size by inner_ranks="):
        kind(process_group=None)
    for wrong in ({"outer": "x"}, {"delay": 99}, {"wire": "int3"}, {"wire_dtype": "int8"}):
        with pytest.raises(ValueError, match="Hint: "):
            kind(**wrong)


def test_two_optimizers_are_refused(rank_pool: Pool) -> None:
    rank_pool(2).run(misuse, PACKAGES[0])


@case
def train_with_a_scaler(rank: int, world: int, package: str) -> None:
    mixed = importlib.import_module(f"{package}.plugins").MixedPrecision
    scaled = mixed("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    kind: Any = strategy_class(package, "SMDDPLocalStrategy")
    made = trainer(package, strategy=kind(inner_ranks=1), plugins=[scaled])
    with pytest.raises(ValueError, match=r"GradScaler .* skips steps.* Hint: precision='bf16-mix"):
        made.fit(model(package), loader())
    assert not dist.is_initialized()


def test_a_scaler_of_gradients_is_refused(rank_pool: Pool) -> None:
    rank_pool(2).run(train_with_a_scaler, PACKAGES[0])


@case
def load_elsewhere(rank: int, world: int, package: str, folder: str, ranks: int) -> str:
    """A checkpoint of two ranks, continued by another number of them."""
    kind: Any = strategy_class(package, "SMDDPLocalStrategy")
    made = trainer(package, strategy=kind(every=3, inner_ranks=1), devices=ranks, max_epochs=4)
    trained = model(package)
    made.fit(trained, loader(), ckpt_path=f"{folder}/epoch=1.ckpt")
    return digest(trained)


@pytest.mark.long
def test_a_checkpoint_of_other_ranks(rank_pool: Pool, tmp_path: Path) -> None:
    form = {"inner_ranks": 1, "every": 3}
    rank_pool(2).run(fit, PACKAGES[0], form, str(tmp_path))
    assert len(set(rank_pool(3).run(load_elsewhere, PACKAGES[0], str(tmp_path), 3))) == 1


@case
def fit_with_unlike_metrics(rank: int, world: int, package: str, folder: str, last: bool) -> str:
    """Each rank's metric improves in other epochs."""
    lightning = importlib.import_module(package)
    kind: Any = strategy_class(package, "SMDDPLocalStrategy")
    trained = model(package)
    values = [[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]][rank]
    trained.validation_step = lambda *_: trained.log("metric", values[trained.current_epoch])
    options: dict[str, Any] = {"monitor": "metric", "save_top_k": 2}
    if last:
        options = {"save_top_k": 1, "save_last": "link", "save_on_train_epoch_end": True}
    name = "{epoch}" if last else "{epoch}-{metric:.1f}"
    made = trainer(
        package,
        strategy=kind(every=3, inner_ranks=1),
        callbacks=[lightning.callbacks.ModelCheckpoint(folder, name, **options)],
        enable_checkpointing=True,
        max_epochs=4,
        num_sanity_val_steps=0,
    )
    made.fit(trained, loader(), loader())
    return digest(trained)


def test_checkpoints_of_ranks_stay_together(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(2).run(fit_with_unlike_metrics, PACKAGES[0], str(tmp_path), False)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 4 and [f"{name}.rank1" for name in names[::2]] == names[1::2]


@case
def resume(rank: int, world: int, package: str, path: str) -> str:
    kind: Any = strategy_class(package, "SMDDPLocalStrategy")
    trained = model(package)
    made = trainer(package, strategy=kind(every=3, inner_ranks=1), max_epochs=6)
    made.fit(trained, loader(), ckpt_path=path)
    return digest(trained)


def test_links_and_addresses_are_followed_to_all_files(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(2).run(fit_with_unlike_metrics, PACKAGES[0], str(tmp_path), True)
    assert (tmp_path / "last.ckpt").is_symlink()
    file = str(tmp_path / "epoch=3.ckpt")
    paths = file, str(tmp_path / "last.ckpt"), f"file://{file}"
    first, *others = (rank_pool(2).run(resume, PACKAGES[0], path) for path in paths)
    assert others == [first, first]
    other = tmp_path / "epoch=3.ckpt.rank1"
    other.rename(tmp_path / "kept")
    alone = rank_pool(2).run(resume, PACKAGES[0], file)
    assert alone != first
    # A file of another checkpoint is not taken for this one's.
    state = torch.load(tmp_path / "kept", weights_only=False)
    state["global_step"] = 7
    state["sdp_local_updates"]["save"] = "another"
    torch.save(state, other)
    assert rank_pool(2).run(resume, PACKAGES[0], file) == alone


@case
def fit_again(rank: int, world: int, package: str) -> None:
    kind: Any = strategy_class(package, "SMDDPLocalStrategy")
    made = trainer(package, strategy=kind(every=3, inner_ranks=1))
    trained, groups = model(package), []
    for epoch in range(3):
        made.fit_loop.max_epochs = epoch + 1
        made.fit(trained, loader())
        groups.append(len(dist.distributed_c10d._world.pg_map))
    assert groups[0] == groups[2]


def test_a_fit_leaves_no_group(rank_pool: Pool) -> None:
    rank_pool(2).run(fit_again, PACKAGES[0])
