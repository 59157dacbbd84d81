"""Layers that write large gradients into the buckets of DistributedDataParallel."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.torch import write_into_buckets
from tests.torch.direct_nets import (
    WIDTH,
    changed_layers,
    checkpointed,
    every_layer,
    make,
    no_layer,
    twice,
    words,
    writes,
)
from tests.torch.jobs import assert_same, process_group
from tests.torch.sharded_nets import assert_same_weights


def wrap(model: nn.Module, writes_directly: bool, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=writes_directly, **options)
    if writes_directly:
        write_into_buckets(ddp)
    return ddp


def in_buckets(rank: int, world: int, how: Any, options: dict[str, Any], hook: Any) -> None:
    with process_group():
        models = []
        for writes_directly in True, False:
            ddp = wrap(make(how), writes_directly, **options)
            if hook:
                ddp.register_comm_hook(None, hook)
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
            with writes() as told:
                for step in range(7):
                    for part in range(2):
                        with ddp.no_sync() if part < step % 2 else nullcontext():
                            ddp(words(rank, 2 * step + part)).backward()
                    if step != 3:  # the next ones are added to the averages
                        optimizer.step()
                        optimizer.zero_grad()
            if writes_directly:
                # In steps 2 and 6, with gradients of None; static graphs take a step more to begin.
                assert sum(told) == len(told) / (14 if options.get("static_graph") else 7)
            else:
                assert not told
            models.append(ddp.module)
        assert_same_weights(*models)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": 0.1},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


@pytest.mark.parametrize(
    ("how", "options", "hook"),
    [
        *((None, options, None) for options in OPTIONS),
        (None, {}, fp16_compress_hook),
        (twice, {}, None),
        (checkpointed, {}, None),
    ],
    ids=str,
)
def test_in_buckets_of_ddp(rank_pool: Any, how: Any, options: dict[str, Any], hook: Any) -> None:
    rank_pool(2).run(in_buckets, how, options, hook)


def in_buckets_over_gloo(rank: int, world: int) -> None:
    """With weights that some steps do not use."""
    with process_group():
        models = []
        options = {"process_group": dist.new_group(backend="gloo"), "find_unused_parameters": True}
        for writes_directly in True, False:
            ddp = wrap(make(), writes_directly, **options)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(4):
                ddp.module.how = [every_layer, no_layer][step % 2]
                ddp(words(rank, step)).backward()
                optimizer.step()
                ddp.zero_grad()
            models.append(ddp.module)
        assert_same_weights(*models)


def test_in_buckets_over_gloo(rank_pool: Any) -> None:
    rank_pool(2).run(in_buckets_over_gloo)


def train_in_float64(rank: int, world: int) -> None:
    """Where a weight's part of a bucket lies otherwise than new memory, products may differ."""
    with process_group():
        models = []
        for writes_directly in True, False:
            torch.manual_seed(0)
            layers = nn.Linear(1024, 1030, bias=False), nn.Linear(1030, 3), nn.Linear(3, 1)
            ddp = wrap(nn.Sequential(*layers).double(), writes_directly)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
            for step in range(5):
                torch.manual_seed(10 * step + rank)
                ddp(torch.randn(33, 1024, dtype=torch.float64)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append(ddp.module)
        assert_same_weights(*models)


def test_float64(rank_pool: Any) -> None:
    rank_pool(2).run(train_in_float64)


def freeze(rank: int, world: int) -> None:
    """Frozen layers are left alone, also those that are frozen later."""
    with process_group():
        models = []
        for writes_directly in True, False:
            model = make()
            model.wide.requires_grad_(False)
            ddp = wrap(model, writes_directly, find_unused_parameters=True)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(4):
                model.bare.requires_grad_(step != 2)
                with writes([0, 0, 2, 3][step] if writes_directly else 0):
                    ddp(words(rank, step)).backward()
                optimizer.step()
                ddp.zero_grad()
            assert changed_layers(ddp) == (
                {f"module.{name}" for name in ("embedding", "bare", "scores")}
                if writes_directly
                else set()
            )
            models.append(model)
        assert_same_weights(*models)


def test_frozen_layers(rank_pool: Any) -> None:
    rank_pool(2).run(freeze)


def keep(rank: int, world: int) -> None:
    """Gradients that a program holds are its own, as with other layers."""
    with process_group():
        ddp = wrap(make(), writes_directly=True)
        weight, own = ddp.module.bare.weight, torch.zeros_like(ddp.module.bare.weight)
        ddp(words(rank, 0)).backward()
        held = [weight.grad]  # in buckets of the first step
        values = [weight.grad.clone()]
        ddp.zero_grad()
        for step in range(4):
            with writes(4 * (step > 0)):
                ddp(words(rank, step)).backward()
            ddp.zero_grad()
            with ddp.no_sync(), writes(0):
                weight.grad = own if step == 1 else None
                ddp(words(rank, step)).backward()
            held.append(weight.grad)
            ddp.zero_grad()
            with writes(0):
                ddp.module.bare(torch.full((1, WIDTH), step + 1.0)).sum().backward()
            held.append(weight.grad)
            values += [gradient.clone() for gradient in held[-2:]]
            ddp.zero_grad()
        with writes(4):
            ddp(words(rank, 9)).backward()
        for found, expected in zip(held, values, strict=True):
            assert_same(found, expected)


def test_gradients_that_a_program_holds(rank_pool: Any) -> None:
    rank_pool(2).run(keep)


def leave_buckets(rank: int, world: int) -> None:
    """Nothing is left of a model that is not used any more, nor after leaving."""
    with process_group():
        copies = DistributedDataParallel(make())
        with pytest.raises(ValueError, match="gradient_as_bucket_view=True"):
            write_into_buckets(copies)
        with pytest.raises(TypeError, match="needs a DistributedDataParallel, and got Text"):
            write_into_buckets(copies.module)
        ddp = DistributedDataParallel(make(), gradient_as_bucket_view=True)
        direct = write_into_buckets(ddp)
        assert len(changed_layers(ddp)) == 4
        assert repr(direct) == "<4 layers write gradients of 12.3 MiB>"
        ddp(words(rank, 0)).backward()
        direct.leave()
        assert not changed_layers(ddp)
        with writes(0):
            ddp(words(rank, 1)).backward()
        ddp = wrap(make(), writes_directly=True)
        for step in range(2):
            ddp(words(rank, step)).backward()
            ddp.zero_grad()
        module = ddp.module
        del ddp
        gc.collect()
        assert not changed_layers(module)
        torch.jit.script(module.wide)
        ddp = wrap(copy.deepcopy(wrap(module, writes_directly=True)).module, writes_directly=True)
        assert len(changed_layers(ddp)) == 4
        gone = [weakref.ref(each) for each in (ddp, ddp.module, ddp.module.wide.weight)]
        del ddp
        gc.collect()
        assert [each() for each in gone] == [None] * 3


def test_leaving_buckets(rank_pool: Any) -> None:
    rank_pool(2).run(leave_buckets)
