"""Clipping and scaling the gradients of a ShardedOptimizer."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sdp_plugins.core import _native
from sdp_plugins.torch import ShardedOptimizer
from tests.torch.jobs import assert_same, process_group
from tests.torch.sharded_nets import (
    CLOSE,
    Switched,
    assert_same_weights,
    loss_of,
    plain,
    sharded,
)


def clip(rank: int, world: int) -> None:
    """By the optimizer, and by torch's functions."""
    with process_group():
        ddp, theirs = plain(rank, torch.optim.SGD, lr=0.1)
        both = [sharded(rank, torch.optim.SGD, lr=0.1) for _ in range(2)]
        ways: list[tuple[nn.Module, Any, Any, Any]] = [
            (
                model,
                optimizer,
                partial(nn.utils.clip_grad_norm_, list(model.parameters())),
                partial(nn.utils.clip_grad_value_, list(model.parameters())),
            )
            for model, optimizer in ((ddp, theirs), both[0])
        ]
        model, ours = both[1]
        ways.append((model, ours, ours.clip_grad_norm_, ours.clip_grad_value_))
        for step, norm_type in enumerate((2.0, 1.0, float("inf"), None)):
            norms = []
            for model, optimizer, clip_norm, clip_value in ways:
                loss_of(model, rank, step).backward()
                if norm_type is None:
                    clip_value(1e-3)
                else:
                    norms.append(clip_norm(1e-2, norm_type))
                optimizer.step()
                optimizer.zero_grad()
            for norm in norms:
                torch.testing.assert_close(norm, norms[0], **CLOSE)
            for model, *_ in ways[1:]:
                assert_same_weights(model, ddp, atol=1e-6, rtol=1e-5)
        loss_of(ddp, rank, 0).backward()
        loss_of(model, rank, 0).backward()
        expected = [p.grad.norm() for p in ddp.parameters() if p.grad is not None]
        found = [p.grad.data.norm(2) for p in model.parameters() if p.grad is not None]
        torch.testing.assert_close(found, expected, **CLOSE)
        with pytest.raises(ValueError, match="norm_type 0"):
            ours.clip_grad_norm_(1.0, 0)


def test_clipping(rank_pool: Any) -> None:
    rank_pool(2).run(clip)


def clip_uneven(rank: int, world: int) -> None:
    """Gradients that only some ranks have, or that came in an earlier backward pass."""
    with process_group():
        model = Switched()
        optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        model(torch.ones(4, 9), (0, 1 + rank)).sum().backward()
        with pytest.raises(RuntimeError, match=r"layers\.2\.bias came from some ranks only"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(RuntimeError, match=r"Hint: clip by the optimizer's"):
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
        norm = optimizer.clip_grad_norm_(1e-3)
        optimizer.step()
        with optimizer.no_sync():
            model(torch.ones(4, 9), (3,)).sum().backward()
        model(torch.ones(4, 9), (0,)).sum().backward()
        with pytest.raises(RuntimeError, match=r"layers\.3\..* last backward pass"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model(torch.ones(4, 9), (rank,)).sum().backward()
        parameters = model.layers[0].parameters()  # type: ignore[union-attr]
        wait: Any = (
            partial(nn.utils.clip_grad_norm_, parameters, 1.0) if rank == 0 else optimizer.step
        )
        with pytest.raises(
            RuntimeError, match=r"some ranks clip .* before step\(\), and others do"
        ):
            wait()
        for parameter, expected in zip(model.parameters(), before, strict=True):
            assert_same(parameter, expected)
        optimizer.zero_grad()
        norms = [torch.zeros(()) for _ in range(world)]
        dist.all_gather(norms, norm)
        assert norms[0] == norms[1] > 0


def test_clipping_where_ranks_have_other_gradients(rank_pool: Any) -> None:
    rank_pool(2).run(clip_uneven)


def scale(rank: int, world: int) -> None:
    """One rank's overflow is everyone's; the steps around it are as without a scaler."""
    with process_group():
        ddp, theirs = plain(rank, torch.optim.SGD, lr=0.1)
        model, ours = sharded(rank, torch.optim.SGD, lr=0.1)
        for wrapped, optimizer in (ddp, theirs), (model, ours):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(4):
                loss = loss_of(wrapped, rank, step)
                if step == 1 and rank == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                if step == 3:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(wrapped.parameters(), 1e-3)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scaler.get_scale() == 512.0
        assert_same_weights(model, ddp, atol=1e-6, rtol=1e-5)


def scale_differently(rank: int, world: int) -> None:
    """Each rank would divide its part of the average by its own scale."""
    with process_group():
        model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + rank))
        scaler.scale(loss_of(model, rank, 0)).backward()
        with pytest.raises(
            RuntimeError, match=r"step\(\): .*scaled gradients by different factors"
        ):
            scaler.step(optimizer)


def test_grad_scaler(rank_pool: Any) -> None:
    for case in scale, scale_differently:
        rank_pool(2).run(case)


def clip_late(rank: int, world: int) -> None:
    """Rank 1 is late: rank 0 may write neither what it still averages nor the weights it reads."""
    with process_group():
        torch.manual_seed(0)
        model = nn.Linear(300, 300, bias=False)
        optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=1.0)
        combine = _native.combine

        def late(*args: Any) -> None:
            time.sleep(0.2 * rank)
            combine(*args)

        x = torch.ones(1, 300)
        model(x).sum().backward()
        with mock.patch.object(_native, "combine", late):
            optimizer.clip_grad_value_(1e9)
        found = [tensor.grad.clone() for _, tensor in optimizer._inner.pieces]  # type: ignore[union-attr]
        optimizer.zero_grad()
        (100 * model(x).sum()).backward()
        assert found and all((each == 1).all() for each in found)
        before = model.weight.detach().clone()
        optimizer.clip_grad_norm_(1e9)
        time.sleep(0.2 * rank)
        assert_same(model.weight, before)
        optimizer.step()
        assert_same(model.weight, before - 100)


def test_ranks_that_are_late_after_clipping(rank_pool: Any) -> None:
    rank_pool(2).run(clip_late)


def unscale_some(rank: int, world: int) -> None:
    """A rank may have gradients of some data types only; norms are of all."""
    with process_group():
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.float64)])
        optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        loss = model[0](torch.ones(3)).sum()
        if rank == 0:
            loss = loss + model[1](torch.ones(3, dtype=torch.float64)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert optimizer.clip_grad_norm_(1e9, "inf") == 1
        torch.testing.assert_close(
            optimizer.clip_grad_norm_(1e9), torch.tensor((12 + 3) ** 0.5).double()
        )
        scaler.step(optimizer)
        optimizer.close()
        before = model[0].bias.clone()
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        model[0](torch.ones(3)).sum().backward()
        plain.step()  # each rank for itself
        assert_same(model[0].bias, before - 1)
        dist.barrier()


def test_unscaling_and_leaving(rank_pool: Any) -> None:
    rank_pool(2).run(unscale_some)


def drop_after_clipping(rank: int, world: int) -> None:
    """A step is left out, by the script or by GradScaler; the next has gradients of its own."""
    with process_group():
        ddp, theirs = plain(rank, torch.optim.SGD, lr=0.1)
        model, ours = sharded(rank, torch.optim.SGD, lr=0.1)
        for scales in False, True:
            norms: list[list[Any]] = []
            for wrapped, optimizer in (ddp, theirs), (model, ours):
                scaler = torch.amp.GradScaler("cpu", enabled=scales, init_scale=4.0)
                norms.append([])
                for step in range(4):
                    loss = loss_of(wrapped, rank, step)
                    if step == 1:
                        loss = loss * (float("inf") if scales else 1e6)
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    norms[-1].append(nn.utils.clip_grad_norm_(wrapped.parameters(), 1e9))
                    if scales or step != 1:
                        scaler.step(optimizer)
                    scaler.update()
                    wrapped.zero_grad()
            torch.testing.assert_close(norms[1], norms[0], equal_nan=True, **CLOSE)
        assert_same_weights(model, ddp, atol=1e-6, rtol=1e-5)
        # Then, a rank has no gradient, and drops by another call than the others.
        for wrapped, optimizer in (ddp, theirs), (model, ours):
            loss_of(wrapped, rank, 5).backward()
            nn.utils.clip_grad_norm_(wrapped.parameters(), 1e-3)
            (wrapped if rank else optimizer).zero_grad()
            loss_of(wrapped, rank, 6).backward()
            optimizer.step()
        assert_same_weights(model, ddp, atol=1e-6, rtol=1e-5)
        loss_of(model, rank, 5).backward()
        ours.clip_grad_norm_(1.0)
        (model if rank else ours).zero_grad()
        for parameter in model.parameters():  # the script's own
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        bias: Any = model.first.bias  # type: ignore[union-attr]
        expected = bias.detach() - 0.5 * 0.02
        dist.barrier()
        ours.clip_grad_value_(0.5)
        ours.step()
        torch.testing.assert_close(bias, expected)
        loss_of(model, rank, 5).backward()
        ours.clip_grad_norm_(1.0)
        model.zero_grad()
        loss = loss_of(model, rank, 6)
        if rank == 0:
            loss.backward()
        ours.step()
        # Dropped between clipping and the step: nothing is updated, as with a plain optimizer.
        before = [parameter.detach().clone() for parameter in model.parameters()]
        loss_of(model, rank, 5).backward()
        ours.clip_grad_norm_(1.0)
        model.zero_grad()
        ours.step()
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert_same(parameter, old)


def test_gradients_dropped_after_clipping(rank_pool: Any) -> None:
    rank_pool(2).run(drop_after_clipping)


def change_after_clipping(rank: int, world: int) -> None:
    """Gradients that a rank drops or replaces, or accumulates, between clipping and the step."""
    with process_group():
        model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        bias: Any = model.first.bias  # type: ignore[union-attr]

        def replace() -> None:
            bias.grad = torch.ones_like(bias)

        def drop() -> None:
            bias.grad = None

        for change in drop, replace, model.zero_grad:
            for ranks in (0,), (0, 1):
                if change == model.zero_grad and len(ranks) == world:
                    continue  # allowed
                loss_of(model, rank, 0).backward()
                optimizer.clip_grad_norm_(1.0)
                if rank in ranks:
                    change()
                with pytest.raises(RuntimeError, match="were dropped or replaced after they were"):
                    optimizer.step()
                optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        optimizer.clip_grad_norm_(1.0)
        bias.grad = None
        with pytest.raises(
            RuntimeError, match=r"\[rank \d/2\] a second gradient of third\.bias came before"
        ):
            loss_of(model, rank, 0).backward()
        optimizer.zero_grad()
        for parameter, expected in zip(model.parameters(), before, strict=True):
            assert_same(parameter, expected)
        dist.barrier()


def test_gradients_changed_after_clipping(rank_pool: Any) -> None:
    rank_pool(2).run(change_after_clipping)


def clip_others(rank: int, world: int) -> None:
    """Of parameters that the optimizer does not update, each rank has its own gradients."""
    with process_group():
        torch.manual_seed(0)
        base, head = nn.Linear(3, 3), nn.Linear(3, 1)
        optimizer = ShardedOptimizer(head, torch.optim.SGD, lr=0.1)
        before = head.weight.detach().clone()
        head(base(torch.full((3,), 1.0 + rank))).sum().backward()
        nn.utils.clip_grad_norm_([*base.parameters(), *head.parameters()], 0.1)
        with pytest.raises(RuntimeError, match=r"by different factors.*requires_grad_\(False\)"):
            optimizer.step()
        assert_same(head.weight, before)


def test_clipping_of_other_parameters(rank_pool: Any) -> None:
    rank_pool(2).run(clip_others)
