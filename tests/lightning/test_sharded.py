"""The strategies smddp_sharded: the weights of smddp, with one copy per node."""

from __future__ import annotations

import gc
import importlib
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdp_plugins.lightning.namespaces import MODULES, strategy_class
from tests.lightning import cases
from tests.lightning.cases import case
from tests.lightning.models import FABRICS, PACKAGES, data, digest, loader, net, trainer
from tests.ranks import Pool
from tests.torch.jobs import assert_same

# The packages differ in their names only.
ONE_OF_TWO = [PACKAGES[0], pytest.param(PACKAGES[1], marks=pytest.mark.long)]
ONE_FABRIC = [pytest.param(FABRICS[0], marks=pytest.mark.long), FABRICS[1]]


def module_of(package: str, **traits: Any) -> Any:
    """A LightningModule with buffers, frozen parameters and a schedule."""
    lightning = importlib.import_module(package)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.BatchNorm1d(6), net())
            self.other = nn.Linear(6, 2)
            self.frozen = nn.Linear(6, 2).requires_grad_(False)
            self.automatic_optimization = not traits.get("manual")

        def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x) + self.frozen(x), y)
            if self.automatic_optimization:  # clipped: used on one rank, in some batches
                used = traits.get("clip") and (index + self.global_rank) % 3 == 0
                return loss + self.other(x).square().mean() if used else loss
            for optimizer, own in zip(self.optimizers(), (0.0, 1.0), strict=True):
                self.toggle_optimizer(optimizer)
                out = (1 - own) * self.net(x) + own * self.other(x)
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(out, y))
                self.clip_gradients(optimizer, 0.05, "norm")
                optimizer.step()
                self.untoggle_optimizer(optimizer)
            for scheduler in self.lr_schedulers():
                scheduler.step()
            return None

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("val_loss", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            if traits.get("no_optimizer"):
                return None
            if not self.automatic_optimization:
                of = [self.net.parameters(), self.other.parameters()]
                optimizers = [torch.optim.Adam(each, lr=0.01) for each in of]
                return optimizers, [torch.optim.lr_scheduler.StepLR(o, 2) for o in optimizers]
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    torch.manual_seed(2)
    return Model()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3, "max_epochs": 3},
    "clipped by norm": {"gradient_clip_val": 0.05},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "manual": {},
}


@case
def train(rank: int, world: int, package: str, kind: str) -> list[dict[str, Tensor]]:
    """The states of a module after training with either strategy, and what was logged."""
    found = []
    for strategy in "smddp_find_unused_parameters_true", "smddp_sharded":
        m = module_of(package, manual=kind == "manual", clip="clipped" in kind)
        options = {"max_epochs": 2, "strategy": strategy, **OPTIONS[kind]}
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lr_scheduler")
            t = trainer(package, **options)
            t.fit(m, loader(shuffle=True), loader())
        found.append(m.state_dict() | {"val_loss": t.callback_metrics["val_loss"]})
    return found


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("package", ONE_OF_TWO)
def test_weights_are_those_of_smddp(rank_pool: Pool, package: str, kind: str) -> None:
    (expected, first), (_, second) = rank_pool(2).run(train, package, kind)
    for name, value in expected.items():
        if kind == "manual" and name == "val_loss":
            continue  # Lightning's DDP sends no buffers then
        if "running" not in name:  # of batches that each rank has seen after the last broadcast
            assert_same(first[name], second[name])
        if OPTIONS[kind].get("gradient_clip_val") or kind == "manual":
            torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-6)
        else:
            assert_same(first[name], value)


@case
def train_in_bfloat16(rank: int, world: int, package: str, master_weights: bool) -> set[str]:
    """The types of an optimizer's state."""
    m = module_of(package)
    found: set[str] = set()

    def note() -> None:
        for state in m.trainer.optimizers[0].state_dict()["state"].values():
            found.update(f"{name} {value.dtype}" for name, value in state.items())

    m.on_train_end = note
    strategy = strategy_class(package, "SMDDPShardedStrategy")(master_weights=master_weights)
    trainer(package, strategy=strategy, precision="bf16-true").fit(m, loader())
    return found


@pytest.mark.parametrize("package", ONE_OF_TWO)
@pytest.mark.parametrize("master_weights", [True, False])
def test_master_weights(rank_pool: Pool, package: str, master_weights: bool) -> None:
    found = rank_pool(2).run(train_in_bfloat16, package, master_weights)
    of = "float32" if master_weights else "bfloat16"
    expected = {"step torch.float32", f"exp_avg torch.{of}", f"exp_avg_sq torch.{of}"}
    if master_weights:
        expected.add("master_param torch.float32")
    assert found == [expected] * 2


@case
def train_without(rank: int, world: int, package: str) -> str:
    m = module_of(package, no_optimizer=True)
    with pytest.raises(RuntimeError) as caught:
        trainer(package, strategy="smddp_sharded").fit(m, loader())
    return str(caught.value)


@pytest.mark.parametrize("package", ONE_OF_TWO)
def test_a_module_without_a_sharded_optimizer_is_refused(rank_pool: Pool, package: str) -> None:
    for text in rank_pool(2).run(train_without, package):
        assert "no optimizer of it is sharded" in text and "Hint: " in text


@case
def move(rank: int, world: int, package: str, folder: str) -> list[str]:
    """Two epochs with one strategy, a checkpoint, two more with the other."""
    digests = []
    plain, sharded = "smddp_find_unused_parameters_true", "smddp_sharded"
    for first, second in ((plain, sharded), (sharded, plain)):
        for strategy, start, epochs in ((first, None, 2), (second, f"{folder}/{first}", 4)):
            m = module_of(package, clip=True)
            t = trainer(package, strategy=strategy, max_epochs=epochs)
            t.fit(m, loader(shuffle=True), ckpt_path=start)
            if start is None:
                t.save_checkpoint(f"{folder}/{first}")
        digests.append(digest(m))
    return digests


@pytest.mark.parametrize("package", ONE_OF_TWO)
def test_a_checkpoint_moves(rank_pool: Pool, package: str, tmp_path: Path) -> None:
    for first, second in rank_pool(2).run(move, package, str(tmp_path)):
        assert first == second  # of each rank: they have seen other batches last


@pytest.mark.parametrize("package", ONE_OF_TWO)
def test_fit(rank_pool: Pool, package: str, tmp_path: Path) -> None:
    """Validation, early stopping, checkpoints and metrics."""
    sharded = rank_pool(2).run(cases.fit, package, str(tmp_path), "smddp_sharded")
    plain = rank_pool(2).run(cases.fit, package, str(tmp_path / "plain"))
    for found, expected in zip(sharded, plain, strict=True):
        for name in "metrics", "epochs", "steps", "digest":
            assert found[name] == expected[name]
        assert found["strategy"].startswith("sdp_plugins.lightning.")


@pytest.mark.parametrize("package", ONE_OF_TWO)
def test_training_again_after_an_error(rank_pool: Pool, package: str) -> None:
    (error, mine), (other, theirs) = rank_pool(2).run(cases.fit_again, package, "smddp_sharded")
    assert "ArithmeticError" in (error, other)
    assert mine == theirs


@case
def unused(rank: int, world: int, package: str) -> str:
    m = cases.model(package, unused=True)
    trainer(package, strategy="smddp_sharded").fit(m, loader())
    return digest(m)


@pytest.mark.parametrize("package", ONE_OF_TWO)
def test_unused_parameters(rank_pool: Pool, package: str) -> None:
    first, second = rank_pool(2).run(unused, package)
    assert first == second


@pytest.mark.parametrize("package", MODULES)
def test_what_is_refused(package: str) -> None:
    lightning = importlib.import_module(package)
    strategy = strategy_class(package, "SMDDPShardedStrategy")(static_graph=True)
    owner = lightning.Fabric if package in FABRICS else lightning.Trainer
    with pytest.raises(TypeError, match=r"none of its arguments: static_graph\. Hint"):
        owner(strategy=strategy, accelerator="cpu", devices=2)


@case
def average(rank: int, world: int, package: str) -> list[str]:
    digests = []
    for strategy in "smddp", "smddp_sharded":
        module, validation = cases.model(package), loader()
        callback = importlib.import_module(package).callbacks.EMAWeightAveraging()
        trainer(package, strategy=strategy, callbacks=[callback]).fit(module, loader(), validation)
        digests.append(digest(module))
    return digests


def test_weights_that_are_swapped_for_averages(rank_pool: Pool) -> None:
    (plain, first), (_, second) = rank_pool(2).run(average, "lightning.pytorch")
    assert plain == first == second


@case
def loop(rank: int, world: int, package: str, folder: str) -> list[str]:
    """A loop of one's own with Fabric, over a checkpoint, with both strategies."""
    lightning = importlib.import_module(package)
    digests = []
    for strategy in "smddp", "smddp_sharded":
        fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=2)
        fabric.launch()
        path = f"{folder}/{strategy}"
        for start in 0, 4:
            torch.manual_seed(rank)
            module: Any = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 300), nn.Linear(300, 2))
            optimizer: Any = torch.optim.Adam(module.parameters(), lr=0.01)
            if start:
                module = fabric.setup_module(module)
                optimizer = fabric.setup_optimizers(optimizer)
                fabric.load(path, {"module": module, "optimizer": optimizer})
            else:
                module, optimizer = fabric.setup(module, optimizer)
            batches = torch.utils.data.DataLoader(data(), 4)
            for index, (x, y) in enumerate(fabric.setup_dataloaders(batches), start):
                with fabric.no_backward_sync(module, enabled=index % 2 == 0):
                    fabric.backward(nn.functional.mse_loss(module(x), y))
                if index % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            fabric.save(path, {"module": module, "optimizer": optimizer})
            fabric.barrier()
        digests.append(digest(module.module))
        if strategy == "smddp_sharded":
            loss = nn.functional.mse_loss(module(x), y)
            fabric.backward(loss)
            assert fabric.clip_gradients(module, optimizer, max_norm=0.1) > 0
            optimizer.step()
            both = [*module.parameters(), *fabric.setup_module(nn.Linear(2, 2)).parameters()]
            for parameters in nn.Linear(2, 2).parameters(), both:
                with pytest.raises(ValueError, match="belong to no module"):
                    fabric.setup_optimizers(torch.optim.SGD(parameters))
            assert type(optimizer).__name__ == "FabricAdam"
            alone = fabric.setup_module(nn.Linear(6, 2))
            with pytest.raises(RuntimeError, match="no optimizer of it is sharded"):
                alone(x)
            wrapped = weakref.ref(module._forward_module)
            del module, optimizer, loss, alone, both
            gc.collect()
            assert wrapped() is None  # the strategy keeps nothing
    return digests


@pytest.mark.parametrize("package", ONE_FABRIC)
def test_a_loop_with_fabric(rank_pool: Pool, package: str, tmp_path: Path) -> None:
    for first, second in rank_pool(2).run(loop, package, str(tmp_path)):
        assert first == second
