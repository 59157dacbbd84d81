"""Frameworks on a GPU over smddp compute what they compute over gloo; skipped without one.

Two ranks share the first GPU: each believes to be alone on its node.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.ranks import run_ranks
from tests.torch import models
from tests.torch.jobs import assert_same, process_group, values
from tests.torch.test_ddp import CASES

DEVICE = os.environ.get("SDP_TEST_DEVICE", "cuda")  # "cpu": to try the tests themselves
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.device_count(), reason="there is no GPU"
)
BACKENDS = ("smddp", "gloo")
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo"}


def share_the_gpu(rank: int) -> None:
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=str(rank), NODE_RANK=str(rank))
    os.environ["LOCAL_WORLD_SIZE"] = "1"


def over(backend: str, train: Callable[[], list[Tensor]]) -> list[Tensor]:
    print(f"training over {backend}", flush=True)
    with process_group(backend):
        return [tensor.detach().cpu() for tensor in train()]


def both(train: Callable[[], list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return over("smddp", train), over("gloo", train)


def ddp_cases(rank: int, world: int) -> Any:
    names = ["plain", "gradient_as_bucket_view", "find_unused_parameters", "static_graph"]
    names += ["no_sync", "broadcast_buffers", "fp16_compress_hook"]

    def train() -> list[Tensor]:
        found = []
        for name in names:
            case = CASES[name]
            model = models.wrap(case.kind, None, DEVICE, **case.options)
            case.setup(model, dist.group.WORLD)
            case.train(model, rank)
            found += models.state(model)
        return found

    torch.use_deterministic_algorithms(True, warn_only=True)
    return both(train)


def sparse(rank: int, world: int) -> Any:
    def train() -> list[Tensor]:
        tensor = torch.eye(5)[rank : rank + 3].to_sparse().to(DEVICE)
        dist.all_reduce(tensor)
        parts = [torch.empty(7, device=DEVICE) for _ in range(world)]
        dist.all_gather(parts, values(rank, 7).to(DEVICE))
        return [tensor.to_dense(), *parts]

    return both(train)


def fsdp2(rank: int, world: int) -> Any:
    """Like DDP over gloo: FSDP2 over gloo ends with a segmentation fault (torch 2.11)."""
    from torch.distributed.fsdp import fully_shard

    share_the_gpu(rank)

    def train() -> list[Tensor]:
        mesh = dist.init_device_mesh(DEVICE, (world,))
        model = models.make(models.Plain).to(DEVICE)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        models.train(model, rank)
        return [parameter.full_tensor() for parameter in model.parameters()]

    def train_ddp() -> list[Tensor]:
        model = models.wrap(models.Plain, None, DEVICE)
        models.train(model, rank)
        return models.state(model)

    return over("smddp", train), over("gloo", train_ddp)


def lightning(rank: int, world: int) -> Any:
    share_the_gpu(rank)
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = models.make(models.Plain)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return models.loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    found = []
    for strategy in ("smddp", DDPStrategy(process_group_backend="gloo")):
        module = Module()
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="gpu" if DEVICE == "cuda" else "cpu",
            devices=1,
            num_nodes=world,
            max_steps=4,
            use_distributed_sampler=False,  # the batches are this rank's
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False),
        )
        batches = [models.batch(rank, step) for step in range(4)]
        trainer.fit(module, DataLoader(batches, batch_size=None))
        found.append([parameter.detach().cpu() for parameter in module.parameters()])
        dist.destroy_process_group()
    return found


def trainer(rank: int, world: int) -> Any:
    share_the_gpu(rank)
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(1)
    data = [
        {
            "input_ids": torch.randint(99, (12,), generator=generator),
            "labels": torch.tensor(index % 2),
        }
        for index in range(32)
    ]
    found = []
    for backend in BACKENDS:
        torch.manual_seed(5)
        config = BertConfig(
            vocab_size=99,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model = BertForSequenceClassification(config)
        arguments = TrainingArguments(
            output_dir=f"/tmp/sdp-trainer-{os.getpid()}",
            ddp_backend=backend,
            use_cpu=DEVICE == "cpu",
            max_steps=4,
            per_device_train_batch_size=4,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=data).train()
        assert dist.get_backend() == backend
        assert next(model.parameters()).device.type == DEVICE
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        dist.destroy_process_group()
    return found


def scripts(rank: int, world: int) -> Any:
    """What a script for SMDDP 2 on GPUs does."""
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    def train() -> list[Tensor]:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 3)).to(DEVICE)
        where = {"device_ids": [0]} if DEVICE == "cuda" else {}
        model = DistributedDataParallel(model, **where)
        models.train(model, rank)
        return list(model.parameters())

    return both(train)


@pytest.mark.parametrize(
    "function", [ddp_cases, sparse, lightning, trainer, scripts], ids=lambda f: f.__name__
)
def test_both_agree(function: Callable[..., Any]) -> None:
    """Every function returns the final weights of both backends."""
    # Interpreters of their own: a forked process cannot use CUDA if the parent has looked for it.
    for ours, gloos in run_ranks(2, function, env=ENVIRONMENT, timeout_s=150):
        assert_same(ours, gloos)


def test_fsdp2_is_like_ddp() -> None:
    for ours, gloos in run_ranks(2, fsdp2, env=ENVIRONMENT, timeout_s=150):
        torch.testing.assert_close(ours, gloos)
