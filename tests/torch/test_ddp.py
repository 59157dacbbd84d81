"""Stock DistributedDataParallel with its options: bit by bit what gloo gives, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from tests.torch import models
from tests.torch.jobs import assert_same, process_group


def bf16_hook(state, bucket):  # type: ignore[no-untyped-def]
    """DDP itself admits a hook of the name bf16_compress_hook for GPUs only."""
    return default_hooks.bf16_compress_hook(state, bucket)


def power_sgd(model: Any, group: Any) -> None:
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def power_sgd_in_fp16(model: Any, group: Any) -> None:
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
    hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    model.register_comm_hook(state, hook)


def hook(function: Any) -> Callable[[Any, Any], None]:
    return lambda model, group: model.register_comm_hook(group, function)


@dataclass
class Case:
    """One way to use DDP."""

    kind: Callable[[], torch.nn.Module] = models.Plain
    train: Callable[[Any, int], None] = models.train
    options: dict[str, Any] = field(default_factory=dict)
    gloo_options: dict[str, Any] | None = None
    setup: Callable[[Any, Any], None] = lambda model, group: None


CASES = {
    "plain": Case(),
    "many buckets": Case(options={"bucket_cap_mb": 0.01}),
    "gradient_as_bucket_view": Case(options={"gradient_as_bucket_view": True}),
    "views in many buckets": Case(options={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}),
    "find_unused_parameters": Case(models.Branching, options={"find_unused_parameters": True}),
    "static_graph": Case(options={"static_graph": True}),
    "static_graph with views": Case(
        options={"static_graph": True, "gradient_as_bucket_view": True}
    ),
    "no_sync": Case(train=models.train_accumulating),
    "no_sync with views": Case(
        train=models.train_accumulating, options={"gradient_as_bucket_view": True}
    ),
    "join": Case(train=models.train_joining),
    "join, divided by those who are left": Case(
        models.Normalised,
        train=partial(models.train_joining, divide_by_initial_world_size=False),
    ),
    "broadcast_buffers": Case(models.Normalised, options={"broadcast_buffers": True}),
    "mixed dtypes": Case(models.Mixed),
    # DDP does not wait for a delayed reduction: over gloo ranks come apart. Ours are in order.
    "delay_all_reduce": Case(
        options={"delay": ["2.weight", "2.bias"], "gradient_as_bucket_view": True},
        gloo_options={},
    ),
    "allreduce_hook": Case(setup=hook(default_hooks.allreduce_hook)),
    "fp16_compress_hook": Case(setup=hook(default_hooks.fp16_compress_hook)),
    "bf16_compress_hook": Case(setup=hook(bf16_hook)),
    # One bucket: in several, gloo hangs, as its two threads wait in callbacks for each other.
    "PowerSGD": Case(setup=power_sgd, options={"bucket_cap_mb": 100}),
    "PowerSGD in fp16": Case(setup=power_sgd_in_fp16, options={"bucket_cap_mb": 100}),
}


def run_case(rank: int, world: int, name: str) -> str:
    """Train once over each backend; the path that smddp's last reduction took."""
    case = CASES[name]
    with process_group():
        results = {}
        for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
            options = case.options
            if dist.get_backend(group) == "gloo" and case.gloo_options is not None:
                options = case.gloo_options
            model = models.wrap(case.kind, group, **options)
            case.setup(model, group)
            torch.manual_seed(3)  # PowerSGD draws random numbers
            case.train(model, rank)
            assert models.agree(list(model.parameters()))
            results[dist.get_backend(group)] = models.state(model)
        before = models.state(models.make(case.kind))
        assert not all(map(torch.equal, results["smddp"], before))
        assert_same(results["smddp"], results["gloo"])
        return str(dist.group.WORLD.last_path)


@pytest.mark.parametrize("name", CASES)
def test_like_gloo(rank_pool: Any, name: str) -> None:
    rank_pool(2).run(run_case, name)


def run_two_joins(rank: int, world: int) -> None:
    """Each model's reducer waits for the work of its own join."""
    with process_group():
        one, two = (models.wrap(models.Plain, None) for _ in range(2))
        left = {"divide_by_initial_world_size": False}
        with one.join(**left), two.join(**left):
            for step in range(3):
                losses = [models.loss_of(m, models.batch(rank, step)) for m in (one, two)]
                for loss in losses:
                    loss.backward()
        assert models.agree([p.grad for p in (*one.parameters(), *two.parameters())])


def test_two_joins(rank_pool: Any) -> None:
    rank_pool(2).run(run_two_joins)


def run_join_under_a_mode(rank: int, world: int) -> None:
    """With a default device, which is a mode, torch's functions have more callers in Python."""
    with process_group(), torch.device("cpu"):
        model = models.wrap(models.Plain, None)
        with model.join(divide_by_initial_world_size=False):
            for step in range(2 + rank):
                models.loss_of(model, models.batch(rank, step)).backward()


def test_join_under_a_default_device(rank_pool: Any) -> None:
    rank_pool(2).run(run_join_under_a_mode)


def run_buffers(rank: int, world: int) -> list[float]:
    """Without broadcast_buffers every rank has its own statistics."""
    with process_group():
        model = models.wrap(models.Normalised, None, broadcast_buffers=False)
        models.train(model, rank)
        assert models.agree(list(model.parameters()))
        return model.module[1].running_mean.tolist()


def test_buffers_of_their_own(rank_pool: Any) -> None:
    first, second = rank_pool(2).run(run_buffers)
    assert first != second


def run_many_ranks(rank: int, world: int) -> None:
    """More than two ranks: sums are in another order than gloo's, but equal on all ranks."""
    with process_group():
        for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            model = models.wrap(models.Plain, None, bucket_cap_mb=1, **options)
            models.train(model, rank)
            assert models.agree(models.state(model))


def test_three_ranks_agree(rank_pool: Any) -> None:
    rank_pool(3).run(run_many_ranks)


def run_power_sgd_in_many_buckets(rank: int, world: int) -> None:
    """Its callbacks reduce while other buckets are reduced; ranks must agree all the same."""
    with process_group():
        torch.manual_seed(3)
        model = models.wrap(models.Plain, None, bucket_cap_mb=0.01)
        power_sgd(model, None)
        models.train(model, rank, steps=12)
        assert models.agree(models.state(model))


@pytest.mark.parametrize("world", [2, 3])
def test_power_sgd_in_many_buckets(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_power_sgd_in_many_buckets)


def run_equivalence(rank: int, world: int, options: dict[str, Any]) -> Any:
    with process_group():
        model = models.wrap(models.Plain, None, **options)
        models.train(model, rank)
        return [parameter.detach() for parameter in model.parameters()]


def train_alone(world: int) -> list[torch.Tensor]:
    """One process with all ranks' batches in one."""
    model = models.make(models.Plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(models.STEPS):
        inputs, targets = zip(*[models.batch(rank, step) for rank in range(world)], strict=True)
        optimizer.zero_grad()
        models.loss_of(model, (torch.cat(inputs), torch.cat(targets))).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "static_graph": True}])
def test_steps_on_ranks_are_steps_on_one(
    rank_pool: Any, world: int, options: dict[str, Any]
) -> None:
    alone = train_alone(world)
    for parameters in rank_pool(world).run(run_equivalence, options):
        torch.testing.assert_close(parameters, alone, rtol=1e-5, atol=1e-6)


def run_compiled(rank: int, world: int) -> None:
    """DDP under torch.compile, which must not trace into the process group."""
    with process_group():
        results = []
        for compiled in (False, True):
            model: Any = models.wrap(models.Normalised, None)
            models.train(torch.compile(model, backend="aot_eager") if compiled else model, rank)
            results.append(models.state(model))
        torch.testing.assert_close(*results)


def test_compiled(rank_pool: Any) -> None:
    rank_pool(2).run(run_compiled)
