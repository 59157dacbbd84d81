"""ddp_backend="smddp_sharded": what smddp computes, from one copy of the weights per node."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Pool

pytest.importorskip("transformers")

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.torch import ShardedOptimizer
from tests.huggingface import cases
from tests.huggingface.cases import case
from tests.huggingface.training import bert, digest, gaps, losses, rows, trainer

NO_CLIPPING = {"max_grad_norm": 0.0}  # norms are added in another order


def on_both(pool: Pool, case: Any, *args: Any) -> tuple[list[Any], list[Any]]:
    """A case's results with shards and without, in rank order."""
    return pool(2).run(case, "smddp_sharded", *args), pool(2).run(case, "smddp", *args)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 3}, {"optim": "adafactor"}], ids=str
)
def test_trainer(rank_pool: Pool, tmp_path: Path, options: dict[str, Any]) -> None:
    arguments = {**NO_CLIPPING, "average_tokens_across_devices": False, **options}
    sharded, plain = on_both(rank_pool, cases.fit, str(tmp_path), arguments)
    assert [rank.pop("buckets") for rank in (*sharded, *plain)] == [0, 0, 4, 4]
    assert sharded == plain
    assert len(set(sharded[0]["losses"])) == 4


@case
def clip(backend: str, folder: str) -> tuple[list[float], list[float], bool]:
    made = trainer(folder, ddp_backend=backend, use_cpu=True, max_grad_norm=0.01)
    made.train()
    norms = [entry["grad_norm"] for entry in made.state.log_history if "grad_norm" in entry]
    wrapped = isinstance(made.model_wrapped, DistributedDataParallel)
    return losses(made), norms, wrapped


def test_norms(rank_pool: Pool, tmp_path: Path) -> None:
    sharded, plain = on_both(rank_pool, clip, str(tmp_path))
    for ours, theirs in zip(sharded, plain, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
        assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
        assert len(ours[1]) == 4
        assert (ours[2], theirs[2]) == (False, True)


def test_resumed_training_is_the_same(rank_pool: Pool, tmp_path: Path) -> None:
    for whole, resumed in rank_pool(2).run(cases.stop_and_resume, "smddp_sharded", str(tmp_path)):
        assert whole == resumed
        assert len(whole[0]) == 6


@case
def move(folder: str) -> list[str]:
    """A checkpoint of either continues with the other, and on each node a rank may save."""
    digests = []
    for first, second in (("smddp", "smddp_sharded"), ("smddp_sharded", "smddp")):
        path = f"{folder}/{first}"
        save = {"save_strategy": "steps", "save_steps": 3, "save_on_each_node": True}
        given = {**NO_CLIPPING, **save, "max_steps": 6, "use_cpu": True}
        for backend, start in ((first, None), (second, f"{path}/checkpoint-3")):
            made = trainer(path, ddp_backend=backend, **given)
            made.train(resume_from_checkpoint=start)
            digests.append(digest(made.model))
            assert isinstance(made.optimizer.optimizer, ShardedOptimizer) == (
                backend == "smddp_sharded"
            )
            cases.reset()
    return digests


def test_a_checkpoint_moves(rank_pool: Pool, tmp_path: Path) -> None:
    results = rank_pool(2).run(move, str(tmp_path))
    assert len({each for digests in results for each in digests}) == 1


@case
def prepare(folder: str) -> tuple[str, str, str]:
    """accelerate's own loop: named in its keyword arguments, with checkpoints."""
    named = InitProcessGroupKwargs(backend="smddp_sharded")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[named])
    model = bert()
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match="the model first"):
        accelerator.prepare(optimizer, model)
    batch = gaps(rows(2))
    with pytest.raises(RuntimeError, match="no optimizer of it is prepared"):
        accelerator.prepare(bert()).train()(**batch)
    both = [accelerator.prepare(torch.nn.Linear(2, 2)) for _ in range(2)]
    over_both = torch.optim.SGD([p for each in both for p in each.parameters()])
    with pytest.raises(ValueError, match="belong to no prepared model, or to several"):
        accelerator.prepare(over_both)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader(rows(16), batch_size=2, collate_fn=gaps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    trained = digest(accelerator.unwrap_model(model))
    accelerator.save_state(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    zeroed = digest(model)
    accelerator.load_state(folder)
    return trained, zeroed, digest(model)


@case
def train_otherwise(folder: str) -> None:
    """A copy of a prepared model, and the model after close(), train as any other does."""
    named = InitProcessGroupKwargs(backend="smddp_sharded")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[named])
    x = torch.ones(1, 2)
    alone = accelerator.prepare(torch.nn.Linear(2, 2))
    copy.deepcopy(alone)(x).sum().backward()
    plain = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    accelerator.backward(model(x).sum())
    optimizer.step()
    copy.deepcopy(model)(x).sum().backward()
    optimizer.optimizer.close()
    assert not model._forward_pre_hooks
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_models_that_train_otherwise(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(2).run(train_otherwise, str(tmp_path))


def test_a_loop_of_accelerate(rank_pool: Pool, tmp_path: Path) -> None:
    first, second = rank_pool(2).run(prepare, str(tmp_path))
    assert first == second
    trained, zeroed, loaded = first
    assert trained == loaded != zeroed


def test_the_command_line_offers_it() -> None:
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser(TrainingArguments)
    given = ["--output_dir", "out", "--ddp_backend", "smddp_sharded"]
    assert parser.parse_args(given).ddp_backend == "smddp_sharded"
