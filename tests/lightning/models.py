"""A small model for every Lightning package, and what to do with one."""

from __future__ import annotations

import hashlib
import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")


def data(samples: int = 32) -> TensorDataset:
    """A linear task with some noise; the same everywhere."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 6, generator=generator)
    y = x @ torch.randn(6, 2, generator=generator)
    return TensorDataset(x, y + 0.1 * torch.randn(samples, 2, generator=generator))


def loader(batch_size: int = 4, samples: int = 32, **options: Any) -> DataLoader:
    """The task in batches."""
    return DataLoader(data(samples), batch_size, **options)


def net() -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def model(package: str, **traits: Any) -> Any:
    """A LightningModule of `package`; `traits` become attributes."""
    lightning = importlib.import_module(package)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.unused = nn.Linear(2, 2) if traits.get("unused") else None
            self.seen: list[Tensor] = []

        def step(self, batch: list[Tensor]) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if traits.get("broken"):
                raise ArithmeticError("a fault of the model")
            self.seen.append(batch[0][:, 0].clone())
            loss = self.step(batch)
            self.log("train_loss", loss, sync_dist=True, on_epoch=True)
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.log("val_loss", self.step(batch), sync_dist=True)
            self.log("rank", float(self.global_rank), sync_dist=True, reduce_fx="sum")

        def test_step(self, batch: list[Tensor], index: int) -> None:
            self.log("test_loss", self.step(batch), sync_dist=True)

        def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Model()


def trainer(package: str, **options: Any) -> Any:
    """A quiet Trainer on two CPU ranks over smddp."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"strategy": "smddp", "accelerator": "cpu", "devices": 2, "max_epochs": 1}
    lightning = importlib.import_module(package)
    return lightning.Trainer(**{"enable_checkpointing": False, **quiet, **defaults, **options})


def digest(module: nn.Module) -> str:
    """Equal if and only if the weights have the same bytes."""
    content = hashlib.sha256()
    for tensor in module.state_dict().values():
        content.update(tensor.numpy().tobytes())
    return content.hexdigest()
