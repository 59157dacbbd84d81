"""What the ranks of a pool run: `case(rank, world, package, ...)`."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

from sdp_plugins.core import PeerLostError
from sdp_plugins.lightning.namespaces import strategy_class
from sdp_plugins.lightning.strategy import leave_group
from tests.lightning.models import FABRICS, data, digest, loader, model, trainer
from tests.ranks import job_environment
from tests.torch.direct_nets import writes


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    """A case with a process group of its own."""

    @wraps(function)
    def run(rank: int, world: int, *args: Any) -> Any:
        try:
            return function(rank, world, *args)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return run


@case
def leave(rank: int, world: int, code: int | None) -> str:
    """Rank 1's script ends by sys.exit() in the middle of training; what rank 0 reads."""
    dist.init_process_group("smddp")
    dist.barrier()
    if rank == 1:
        leave_group(SystemExit(code))
        return ""
    try:
        dist.barrier()
    except PeerLostError as error:
        return str(error)
    return "nobody noticed"


@case
def fit(
    rank: int, world: int, package: str, folder: str, strategy: str = "smddp"
) -> dict[str, Any]:
    """Training with validation, checkpoints, early stopping, metrics and accumulation."""
    lightning = importlib.import_module(package)
    stop = lightning.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)
    keep = lightning.callbacks.ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    t = trainer(
        package,
        strategy=strategy,
        max_epochs=9,
        callbacks=[stop, keep],
        enable_checkpointing=True,
        accumulate_grad_batches=2,
    )
    m = model(package)
    t.fit(m, loader(shuffle=True), loader())
    return {
        "backend": dist.get_backend(),
        "strategy": type(t.strategy).__module__,
        "sampler": type(t.train_dataloader.sampler).__name__,
        "seen": torch.cat(m.seen[:4]),
        "epochs": t.current_epoch,
        "steps": t.global_step,
        "metrics": {name: float(value) for name, value in t.callback_metrics.items()},
        "digest": digest(m),
        "best": keep.best_model_path,
    }


@case
def fit_again(rank: int, world: int, package: str, strategy: str = "smddp") -> tuple[str, str]:
    """Training after one that all ranks have left with an error."""
    m = model(package, broken=True)
    try:
        trainer(package, strategy=strategy).fit(m, loader())
    except (ArithmeticError, PeerLostError) as error:
        m = model(package)
        trainer(package, strategy=strategy).fit(m, loader())
        return type(error).__name__, digest(m)


@case
def prepare(rank: int, world: int, package: str, folder: str) -> list[str]:
    """Data that rank 0 prepares while the others wait (on a gloo group of Lightning's)."""
    lightning = importlib.import_module(package)

    class Data(lightning.LightningDataModule):
        def prepare_data(self) -> None:
            time.sleep(0.2)
            Path(folder, f"by rank {rank}").touch()

        def setup(self, stage: str) -> None:
            self.found = [path.name for path in Path(folder).iterdir()]

        def train_dataloader(self) -> Any:
            return loader()

    data_module = Data()
    trainer(package).fit(model(package), datamodule=data_module)
    return data_module.found


@case
def evaluate(rank: int, world: int, package: str) -> dict[str, Any]:
    """Validation, test and prediction without training."""
    t, m = trainer(package), model(package)
    return {
        "val": t.validate(m, loader(), verbose=False)[0],
        "test": t.test(m, loader(), verbose=False)[0],
        "predicted": torch.cat(t.predict(m, loader())),
    }


@case
def resume(rank: int, world: int, package: str, folder: str) -> tuple[str, str]:
    """Weights after four epochs at a stretch, and after two, a checkpoint and two more."""
    straight, first, second = (model(package) for _ in range(3))
    trainer(package, max_epochs=4).fit(straight, loader(shuffle=True))
    t = trainer(package, max_epochs=2)
    t.fit(first, loader(shuffle=True))
    t.save_checkpoint(f"{folder}/two.ckpt")
    t = trainer(package, max_epochs=4)
    t.fit(second, loader(shuffle=True), ckpt_path=f"{folder}/two.ckpt")
    return digest(straight), digest(second)


@case
def five_steps(rank: int, world: int, package: str, options: dict[str, Any]) -> list[Tensor]:
    """The weights after five steps with batches of 4 on each rank."""
    m = model(package)
    t = trainer(package, max_epochs=-1, max_steps=5, **options)
    in_order = DistributedSampler(data(8 * 5), world, rank, shuffle=False)
    t.fit(m, loader(4, 8 * 5, sampler=in_order))  # Lightning's own sampler always shuffles
    return [parameter.detach() for parameter in m.parameters()]


@case
def large_layers(rank: int, world: int, package: str, copies: bool) -> tuple[str, list[bool], bool]:
    """Digest after training; whether a layer wrote its gradient, by step; if it can still."""
    m = model(package)
    widths = (6, 1024, 1024, 2)
    m.net = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairwise(widths)))
    strategy = strategy_class(package)(**({"gradient_as_bucket_view": False} if copies else {}))
    with writes() as wrote:
        trainer(package, strategy=strategy).fit(m, loader())
    return digest(m), wrote, "forward" in m.net[1].__dict__


@case
def unused_parameters(rank: int, world: int, package: str, strategy: str) -> str:
    """Training of a model of which some parameters get no gradient: the weights, or the error."""
    m = model(package, unused=True)
    try:
        trainer(package, strategy=strategy).fit(m, loader())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return digest(m)


@case
def primitives(rank: int, world: int, package: str) -> dict[str, Any]:
    """What callbacks and modules ask the strategy for."""
    t, m = trainer(package), model(package)
    t.validate(m, loader(), verbose=False)
    s = t.strategy
    s.barrier("a name")
    leaf = torch.full((2,), float(rank + 1), requires_grad=True)
    gathered = s.all_gather(leaf, sync_grads=True)
    (gathered * torch.tensor([[1.0], [10.0]])).sum().backward()
    return {
        "object": s.broadcast({"rank": rank, "list": [1, 2]}, src=1),
        "mean": s.reduce(torch.tensor([rank, 3.0])),
        "sum": s.reduce(torch.tensor([rank, 3]), reduce_op="sum"),
        "integer mean": s.reduce(torch.tensor([rank, 5 + rank, 4])),
        "gathered": gathered.detach(),
        "gradient": leaf.grad,
        "module": m.all_gather({"a": torch.tensor(rank)})["a"],
        "decisions": [s.reduce_boolean_decision(rank == 1, all=every) for every in (True, False)],
    }


@case
def fabric(rank: int, world: int, package: str, strategy: Any) -> dict[str, Any]:
    """A loop of one's own with Fabric."""
    f = importlib.import_module(package).Fabric(strategy=strategy, accelerator="cpu", devices=2)
    f.launch()
    torch.manual_seed(rank)  # setup must bring the weights of rank 0 to all
    module = torch.nn.Linear(6, 2)
    module, optimizer = f.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    batches = f.setup_dataloaders(torch.utils.data.DataLoader(data(), 4))
    for x, y in batches:
        with f.no_backward_sync(module, enabled=False):
            f.backward(torch.nn.functional.mse_loss(module(x), y))
        optimizer.step()
        optimizer.zero_grad()
    f.barrier()
    return {
        "backend": dist.get_backend(),
        "sampler": type(batches.sampler).__name__,
        "batches": len(batches),
        "digest": digest(module.module),
        "object": f.broadcast(["from", rank], src=0),
        "mean": f.all_reduce(torch.tensor(float(rank))),
        "gathered": f.all_gather(torch.tensor(rank)),
        "views": module._forward_module.gradient_as_bucket_view,
    }


def launched(rank: int, world: int, package: str, variables: dict[str, str]) -> dict[str, Any]:
    """A Trainer or Fabric in a process that has only these variables of a launcher."""
    with launched_by(rank, variables):
        return meet(rank, world, package)


@contextmanager
def launched_by(rank: int, variables: dict[str, str]) -> Iterator[None]:
    """Have the variables of another launcher than the tests'."""
    before = dict(os.environ)
    try:
        for name in (*job_environment(1), "RANK", "LOCAL_RANK"):
            if name != "SDP_JOB_ID":
                os.environ.pop(name, None)
        port = before["MASTER_PORT"]
        os.environ.update({k: v.format(rank=rank, port=port) for k, v in variables.items()})
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@case
def meet(rank: int, world: int, package: str) -> dict[str, Any]:
    """Join the group and add up."""
    if package in FABRICS:
        lightning = importlib.import_module(package)
        owner = lightning.Fabric(strategy="smddp", accelerator="cpu", devices=2)
        owner.launch()
    else:
        owner = trainer(package)
        owner.validate(model(package), loader(), verbose=False)
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    return {
        "environment": type(owner.strategy.cluster_environment).__name__,
        "rank": owner.strategy.global_rank,
        "world": owner.strategy.world_size,
        "sum": value.item(),
    }
