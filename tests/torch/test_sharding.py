"""ShardedOptimizer: the bits of DDP, from weights that a node has once."""

from __future__ import annotations

import copy
import ctypes
import io
import mmap
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.core import CollectiveMismatchError, PeerLostError, SdpError
from sdp_plugins.torch import ShardedOptimizer
from sdp_plugins.torch.sharding import optimizer as optimizer_module
from sdp_plugins.torch.sharding.checks import BY_ELEMENT
from sdp_plugins.torch.sharding.layout import ALIGNMENT, lay_out
from sdp_plugins.torch.sharding.weights import touch
from tests.launch.jobs import launch
from tests.ranks import Start, say
from tests.torch.jobs import assert_same, process_group
from tests.torch.sharded_nets import (
    CLOSE,
    STEPS,
    Net,
    Switched,
    assert_same_weights,
    loss_of,
    make,
    parameter_groups,
    plain,
    sharded,
    train,
    train_like_ddp,
)

CASES: list[tuple[Any, dict[str, Any]]] = [
    *((kind, {"lr": 0.01}) for kind in BY_ELEMENT),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "fused": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    (torch.optim.Adagrad, {"lr": 0.01, "fused": True}),
]


def like_ddp(rank: int, world: int, kind: Any, options: dict[str, Any]) -> None:
    train_like_ddp(rank, kind, options)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_like_ddp(rank_pool: Any, kind: Any, options: dict[str, Any]) -> None:
    rank_pool(2).run(like_ddp, kind, options)


def like_one_process(rank: int, world: int) -> None:
    with process_group():
        model, ours = sharded(rank, torch.optim.AdamW, lr=0.01, eps=1e-3)
        model.eval()  # statistics of a batch are each rank's own
        train(model, ours, rank)
        alone = make(0).eval()
        optimizer = torch.optim.AdamW(parameter_groups(alone), lr=0.01, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(STEPS):
            sum(loss_of(alone, each, step) for each in range(world)).div(world).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert_same_weights(model, alone, atol=1e-6, rtol=1e-5)
        digests: list[Any] = [None] * world
        dist.all_gather_object(digests, [p.detach().clone() for p in model.parameters()])
        for other in digests[1:]:
            for found, expected in zip(other, digests[0], strict=True):
                assert_same(found, expected)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_like_one_process(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(like_one_process)


def begin(rank: int, world: int) -> None:
    with process_group():
        model, _ = sharded(rank, torch.optim.SGD, lr=0.1)
        torch.manual_seed(0)
        expected = Net()
        assert_same_weights(model, expected)
        for found, other in zip(model.buffers(), expected.buffers(), strict=True):
            assert_same(found, other)


def test_all_begin_as_rank_0(rank_pool: Any) -> None:
    rank_pool(2).run(begin)


def accumulate(rank: int, world: int) -> None:
    with process_group():
        ddp, theirs = plain(rank, torch.optim.SGD, lr=0.1)
        model, ours = sharded(rank, torch.optim.SGD, lr=0.1)
        for wrapped, optimizer, no_sync in (ddp, theirs, ddp.no_sync), (model, ours, ours.no_sync):  # type: ignore[operator]
            for step in range(3):
                with no_sync():
                    loss_of(wrapped, rank, 2 * step).backward()
                loss_of(wrapped, rank, 2 * step + 1).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(model, ddp)


def test_accumulation(rank_pool: Any) -> None:
    rank_pool(2).run(accumulate)


def accumulate_in_turns(rank: int, world: int) -> None:
    """Without no_sync(), as DDP allows, too."""
    with process_group():
        models = [sharded(rank, torch.optim.SGD, lr=0.1) for _ in range(2)]
        for model, optimizer in models:
            with nullcontext() if model is models[0][0] else optimizer.no_sync():
                loss_of(model, rank, 0).backward()
                model.first(torch.full((2, 401 * 4), 1.0 + rank)).sum().backward()  # type: ignore[operator]
            loss_of(model, rank, 2).backward()
            norm = optimizer.clip_grad_norm_(0.5)
            assert norm > 0.5
            optimizer.step()
        assert_same_weights(models[0][0], models[1][0])


def test_accumulation_without_no_sync(rank_pool: Any) -> None:
    rank_pool(2).run(accumulate_in_turns)


def refuse_second_gradients(rank: int, world: int) -> None:
    """Across nodes: other ranks have the first ones."""
    with process_group():
        model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        loss_of(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"second gradient of third\.bias .*no_sync"):
            loss_of(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"second gradient of third\.bias"):
            optimizer.step()  # of gradients that are not whole
        with optimizer.no_sync(), pytest.raises(RuntimeError, match="second gradient"):
            loss_of(model, rank, 0).backward()
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        optimizer.step()


def send_buffers(rank: int, world: int) -> None:
    """As DDP does by default: what normalization remembers is what rank 0 has seen."""
    with process_group():
        ddp = DistributedDataParallel(make(rank))
        theirs = torch.optim.SGD(parameter_groups(ddp), lr=0.1)
        model, ours = sharded(rank, torch.optim.SGD, lr=0.1)
        train(ddp, theirs, rank)
        train(model, ours, rank)
        for found, expected in zip(model.buffers(), ddp.buffers(), strict=True):
            assert_same(found, expected)
        if rank == 0:
            loss_of(model.eval(), rank, 0)  # one rank may evaluate alone
        dist.barrier()


def test_buffers(rank_pool: Any) -> None:
    rank_pool(2).run(send_buffers)


def checkpoint(rank: int, world: int) -> None:
    """torch.compile, and activations that are computed again, change nothing."""
    with process_group():
        models = []
        for _ in range(3):
            torch.manual_seed(0)
            models.append(nn.Sequential(nn.Linear(9, 300), nn.Tanh(), nn.Linear(300, 9)))
        optimizers = [ShardedOptimizer(each, torch.optim.Adam, lr=0.01) for each in models]
        compiled = torch.compile(models[1], backend="aot_eager")
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(rank))
        for _ in range(3):
            models[0](x).square().sum().backward()
            compiled(x).square().sum().backward()
            again = torch.utils.checkpoint.checkpoint(models[2], x, use_reentrant=False)
            again.square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(models[1], models[0], atol=1e-6, rtol=1e-5)
        assert_same_weights(models[2], models[0])


def test_compiled_and_checkpointed(rank_pool: Any) -> None:
    rank_pool(2).run(checkpoint, timeout_s=160)


def skip(rank: int, world: int) -> None:
    """Gradients that are dropped without a step have changed nothing."""
    with process_group():
        ddp, theirs = plain(rank, torch.optim.SGD, lr=0.1)
        model, ours = sharded(rank, torch.optim.SGD, lr=0.1)
        for wrapped, optimizer in (ddp, theirs), (model, ours):
            for step in range(4):
                loss_of(wrapped, rank, step).backward()
                if step % 2:
                    optimizer.step()
                optimizer.zero_grad()
        # Sums over uneven nodes have another order.
        assert_same_weights(model, ddp, **(CLOSE if world == 3 else {}))


def test_steps_that_are_left_out(rank_pool: Any) -> None:
    rank_pool(2).run(skip)


class Odd(nn.Module):
    """Gradients that are views of one memory; parameters without a dimension, or an element."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.ParameterList(torch.randn(200, 200) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = (each.reshape(400, 100) for each in self.pair)
        self.seen = self.seen * 0.5 + x.mean()
        return ((a + b) @ x).sum(0) * ((c + d) @ x).sum(0) * self.scale + self.seen


def odd(rank: int, world: int) -> None:
    """Like DDP through a checkpoint, through what users do to gradients, and in two models."""
    with process_group():
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(nn.ModuleList([Odd(), nn.Linear(100, 1, bias=False)]))
        ddp = [DistributedDataParallel(each, find_unused_parameters=True) for each in models[0]]
        results = []
        for parts, kind in (ddp, torch.optim.AdamW), (list(models[1]), ShardedOptimizer):
            optimizers = [
                kind(part, torch.optim.AdamW, lr=1e-3)
                if kind is ShardedOptimizer
                else kind(part.parameters(), lr=1e-3)
                for part in parts
            ]
            for step in range(4):
                x = torch.randn(100, 3, generator=torch.Generator().manual_seed(9 * step + rank))
                optimizers[1].zero_grad()
                loss = parts[1](x.T).square().mean()
                loss.backward()
                optimizers[1].step()
                optimizers[0].zero_grad()
                first = parts[0](x)
                (first.sum() + parts[1](first.expand(100, 3).T).sum()).backward()  # reaches both
                scale = parts[0].module.scale if kind is torch.optim.AdamW else parts[0].scale
                if step == 1:
                    scale.grad = None
                if step == 2:
                    scale.grad = torch.full((), rank + 1.5 if kind is ShardedOptimizer else 2.0)
                optimizers[0].step()
                if step == 2:
                    for optimizer in optimizers:
                        optimizer.load_state_dict(optimizer.state_dict())
            results.append(optimizers)
        for found, expected in zip(models[1], models[0], strict=True):
            assert_same_weights(found, expected)
            for one, other in zip(found.buffers(), expected.buffers(), strict=True):
                assert_same(one, other)


def test_odd_models(rank_pool: Any) -> None:
    rank_pool(2).run(odd)


class Words(nn.Module):
    """Gradients that are sparse; values of 16 bits, and of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 700, sparse=True)
        self.narrow = nn.Linear(700, 90, dtype=torch.bfloat16)
        self.wide = nn.Linear(90, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(self.words(x).bfloat16()).double())


def mix(rank: int, world: int) -> None:
    with process_group():
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Words())
        ddp = DistributedDataParallel(models[0])
        theirs = torch.optim.SGD(ddp.parameters(), lr=1e-3)
        ours = ShardedOptimizer(models[1], torch.optim.SGD, lr=1e-3)
        for wrapped, optimizer in (ddp, theirs), (models[1], ours):
            for step in range(3):
                x = torch.arange(4 * step + rank, 4 * step + rank + 7)
                loss = wrapped(x).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(models[1], models[0])
        before = models[1].wide.weight.clone()
        models[1](x).square().sum().backward(create_graph=True)  # which DDP does not do
        ours.step()
        assert not models[1].wide.weight.equal(before)


def test_sparse_gradients_and_other_types(rank_pool: Any) -> None:
    rank_pool(2).run(mix)


USED: list[list[tuple[int, ...]]] = [  # by step and rank
    [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4)],
    [(0, 1, 3), (0, 1, 3)],
    [(0, 1), (0, 2)],
    [(4, 0), (0, 4, 3)],
    [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4)],
]


def leave_out(rank: int, world: int) -> None:
    """What no rank uses keeps its weights and its number of steps, through a checkpoint, too."""
    with process_group():
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Switched())
        ddp = DistributedDataParallel(models[0], find_unused_parameters=True)
        theirs = torch.optim.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.1)
        ours = ShardedOptimizer(models[1], torch.optim.AdamW, lr=0.01, weight_decay=0.1)
        for step, used in enumerate(USED):
            x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + rank))
            for model, optimizer in (ddp, theirs), (models[1], ours):
                model(x, used[rank]).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_same_weights(models[1], models[0])
            expected, found = theirs.state_dict()["state"], ours.state_dict()["state"]
            assert found.keys() == expected.keys()
            for index, state in expected.items():
                for name, value in state.items():
                    assert_same(found[index][name], value)
            if step == 3:
                with pytest.raises(ValueError, match="has a ShardedOptimizer already"):
                    ShardedOptimizer(models[1], torch.optim.SGD)
                ours.close()
                ours = ShardedOptimizer(models[1], torch.optim.AdamW, lr=0.01, weight_decay=0.1)
                ours.load_state_dict(theirs.state_dict())


def test_parameters_without_gradient(rank_pool: Any) -> None:
    rank_pool(2).run(leave_out)


def save(rank: int, world: int, path: str) -> None:
    """The state is the plain optimizer's, and training goes on from it as it would have."""
    with process_group():
        ddp, theirs = plain(rank, torch.optim.AdamW, lr=0.01)
        model, ours = sharded(rank, torch.optim.AdamW, lr=0.01)
        train(ddp, theirs, rank)
        train(model, ours, rank)
        expected, found = theirs.state_dict(), ours.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for index, state in expected["state"].items():
            assert found["state"][index].keys() == state.keys()
            for name, value in state.items():
                assert_same(found["state"][index][name], value)
                assert found["state"][index][name].stride() == value.stride()
        if rank == 0:
            torch.save((model.state_dict(), found), path)
        train(model, ours, rank, STEPS)
        if rank == 0:
            torch.save(model.state_dict(), f"{path}.after")


def load(rank: int, world: int, path: str, ranks: int) -> None:
    """Each rank's batches are those of `ranks / world` ranks before."""
    with process_group():
        model, ours = sharded(7, torch.optim.AdamW, lr=0.01)
        weights, state = torch.load(path)
        model.load_state_dict(weights)
        ours.load_state_dict(state)
        if world == ranks:
            train(model, ours, rank, STEPS)
            after = torch.load(f"{path}.after")
            for name, value in dict(model.named_parameters()).items():
                assert_same(value, after[name])
        assert ours.state_dict()["state"].keys() == state["state"].keys()
        for index, each in ours.state_dict()["state"].items():
            if world != ranks:
                for name, value in each.items():
                    assert_same(value, state["state"][index][name])


def test_checkpoints(rank_pool: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "checkpoint")
    rank_pool(2).run(save, path)
    for world in 1, 2, 3:
        rank_pool(world).run(load, path, 2)


def misuse(rank: int, world: int) -> None:
    with process_group():
        model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        loss_of(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"^add: gradients .* cannot be read"):
            model.first.bias.grad + 1  # type: ignore[operator, union-attr]
        optimizer.zero_grad()
        model.first.bias.data = torch.zeros(37)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match=r"weights of first\.bias were replaced"):
            optimizer.step()
        with pytest.raises(TypeError, match="LBFGS"):
            ShardedOptimizer(make(0), torch.optim.LBFGS)
        with pytest.raises(TypeError, match="needs an optimizer or its class, and got 'adamw'"):
            ShardedOptimizer(make(0), "adamw")  # type: ignore[arg-type]
        plain = torch.optim.SGD(make(0).parameters(), lr=0.1).state_dict()
        with pytest.raises(ValueError, match=r"groups of \[\d+\] param.*has groups of .*frozen"):
            optimizer.load_state_dict(plain)
        with pytest.raises(
            ValueError, match=r"other parameters.* on rank 1 than on rank 0; weight: "
        ):
            ShardedOptimizer(nn.Linear(3, 3 + rank), torch.optim.SGD, lr=0.1)
        with pytest.raises(
            ValueError, match=r"settings on rank 1 than on rank 0; lr of parameter group 0: "
        ):
            ShardedOptimizer(nn.Linear(3, 3), torch.optim.SGD, lr=0.1 + rank)
        part = nn.Linear(3, 3)
        if rank:
            part.weight = nn.Parameter(torch.randn(10, 10)[:3, :3])
        with pytest.raises(ValueError, match=r"weight is a part of a tensor.*contiguous"):
            ShardedOptimizer(part, torch.optim.SGD, lr=0.1)
        assert len(dist.group.WORLD._extra_groups) == 1  # type: ignore[union-attr]
        gloo = dist.new_group(backend="gloo")
        dist.barrier(gloo)  # gloo fails in a rank that still connects to one that leaves
        with pytest.raises(ValueError, match="group of smddp"):
            ShardedOptimizer(make(0), torch.optim.SGD, group=gloo)


def test_misuse_is_told(rank_pool: Any) -> None:
    rank_pool(2).run(misuse)


def die(rank: int, world: int) -> None:
    with process_group():
        model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1:
            optimizer._inner.step = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        loss_of(model, rank, 1).backward()
        with pytest.raises(PeerLostError, match="rank 1"):
            optimizer.step()
        with pytest.raises(SdpError, match="rank 1"):  # not: a second gradient
            sum(p.sum() for p in model.parameters() if p.requires_grad).backward()
        for call in optimizer.step, optimizer.state_dict:
            with pytest.raises(SdpError, match="rank 1"):
                call()
        say("told")


def die_while_others_make_it(moment: str, rank: int, world: int) -> None:
    """The error does not come at the time-out only."""
    with process_group() as group:
        if rank == 1:
            place = {"_extra_group": group, "lay_out": optimizer_module}[moment]
            setattr(place, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(PeerLostError, match=r"rank 1 ended .* In ShardedOptimizer, this was"):
            ShardedOptimizer(nn.Linear(9, 9), torch.optim.SGD)
        say("told")


MAKING = [partial(die_while_others_make_it, moment) for moment in ("_extra_group", "lay_out")]


@pytest.mark.parametrize("function", [die, *MAKING], ids=["update", "making-group", "making"])
def test_a_rank_dies(start_pooled: Start, function: Any) -> None:
    with start_pooled(3, function) as ranks:
        for rank in 0, 2:
            assert ranks[rank].heard() == "told"
            ranks[rank].result()


def give_up(rank: int, world: int) -> None:
    dist.init_process_group("smddp")
    model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
    loss_of(model, rank, 0).backward()
    if rank == 1:
        dist.group.WORLD.abort(KeyError("no such file"))  # type: ignore[union-attr]
    else:
        with pytest.raises(PeerLostError, match="rank 1 gave up: KeyError: 'no such file'"):
            optimizer.step()
    dist.destroy_process_group()


def test_a_rank_gives_up(rank_pool: Any) -> None:
    rank_pool(2).run(give_up)


RAISING = """
import torch, torch.distributed as dist
from sdp_plugins.torch import ShardedOptimizer
dist.init_process_group("smddp")
model = torch.nn.Linear(9, 9)
optimizer = ShardedOptimizer(model, torch.optim.SGD)
model(torch.ones(9)).sum().backward()
if dist.get_rank() == 1:
    raise KeyError("no such file")
optimizer.step()
"""


def test_a_rank_raises(tmp_path: Path) -> None:
    """The others hear of it in the group that they wait in."""
    script = tmp_path / "script.py"
    script.write_text(RAISING)
    done = launch("-n", "2", str(script))
    assert done.returncode == 1
    expected = r"PeerLostError: .*all_reduce.*rank 1 gave up: KeyError: 'no such file'"
    assert re.search(expected, done.stderr), done.stderr


def give_up_before(rank: int, world: int) -> None:
    with process_group():
        if rank == 1:
            dist.group.WORLD.abort(KeyError("no such file"))  # type: ignore[union-attr]
            return
        with pytest.raises(PeerLostError, match=r"barrier.*rank 1 gave up: KeyError: 'no such"):
            ShardedOptimizer(nn.Linear(9, 9), torch.optim.SGD)


def test_a_rank_gives_up_before_the_optimizer_is_made(rank_pool: Any) -> None:
    rank_pool(2).run(give_up_before)


def gather_state_alone(rank: int, world: int) -> None:
    with process_group():
        _, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        call: Any = optimizer.state_dict if rank == 0 else dist.barrier
        with pytest.raises(CollectiveMismatchError, match=r"rank 0: all_reduce .*rank 1: barrier"):
            call()


def gather_state_or_step(rank: int, world: int) -> None:
    with process_group():
        model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        loss_of(model, rank, 0).backward()
        call: Any = optimizer.state_dict if rank == 0 else optimizer.step
        with pytest.raises(CollectiveMismatchError, match=r"rank 0: all_reduce .*rank 1: all_redu"):
            call()


def test_a_rank_gathers_the_state_alone(rank_pool: Any) -> None:
    """Told at once, not after the time-outs of two groups."""
    rank_pool(2).run(gather_state_alone)
    rank_pool(2).run(gather_state_or_step)


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 10**9])
def test_layout(world: int, bucket_bytes: int) -> None:
    """Each element of each parameter is in one rank's piece, and in no other."""
    parameters: list[Tensor] = list(make(0).parameters())
    parameters += [nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in (1, 700)]
    groups = [i % 3 for i in range(len(parameters))]
    layout = lay_out(parameters, groups, world, bucket_bytes)
    found: dict[tuple[int, int], int] = {}
    for rank in range(world):
        for piece in layout.pieces(rank):
            bucket = layout.buckets[piece.bucket]
            first, last = bucket.shard(rank)
            assert first <= piece.start < piece.stop <= last
            assert (bucket.offset + first * bucket.dtype.itemsize) % ALIGNMENT == 0
            for at in range(piece.start, piece.stop):
                assert (piece.bucket, at) not in found
                found[piece.bucket, at] = piece.slot.parameter
    slots = [(i, slot) for i, bucket in enumerate(layout.buckets) for slot in bucket.slots]
    assert sorted(slot.parameter for _, slot in slots) == [
        i for i, p in enumerate(parameters) if p.requires_grad
    ]
    for index, slot in slots:
        assert slot.stop - slot.start == parameters[slot.parameter].numel()
        assert slot.group == groups[slot.parameter]
        assert layout.buckets[index].dtype == parameters[slot.parameter].dtype
        for at in range(slot.start, slot.stop):
            assert found.pop((index, at)) == slot.parameter
    assert not found


def copy_the_model(rank: int, world: int) -> None:
    """Averages of weights, as for evaluation, have memory of their own."""
    with process_group():
        model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(model)
        before = copy.deepcopy(model)
        train(model, optimizer, rank)
        average.update_parameters(model)
        assert_same_weights(before, make(0))
        with pytest.raises(AssertionError):
            assert_same_weights(model, before)
        assert_same_weights(average.module, model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert_same_weights(loaded, model)
        assert loss_of(loaded, rank, 0) > 0


def test_copies_of_the_model(rank_pool: Any) -> None:
    rank_pool(2).run(copy_the_model)


def touched_by(rank: int) -> list[bool]:
    """Which pages of two ranks' weights a rank writes first."""
    parameters = [nn.Parameter(torch.zeros(n)) for n in (100_000, 300_000, 7)]
    layout = lay_out(parameters, [0] * 3, world_size=2, bucket_bytes=1_000_000)
    with mmap.mmap(-1, layout.nbytes) as memory:
        buckets = [bucket.of(memoryview(memory)) for bucket in layout.buckets]
        touch(layout, buckets, rank)
        pages = resident_pages(buckets[0].data_ptr(), layout.nbytes)
        del buckets
    return pages


def resident_pages(address: int, nbytes: int) -> list[bool]:
    found = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found) == 0
    return [bool(page & 1) for page in found]


def test_ranks_write_their_shards_first() -> None:
    first, second = touched_by(0), touched_by(1)
    assert all(a or b for a, b in zip(first, second, strict=True))
    both = sum(a and b for a, b in zip(first, second, strict=True))
    assert both <= 4  # pages in which a shard ends
    assert abs(sum(first) - sum(second)) <= 4


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def several_threads(rank: int, world: int) -> None:
    """Copies and averages of several threads have the bits of one thread's."""
    with torch_threads(2):
        like_ddp(rank, world, torch.optim.SGD, {"lr": 0.01})


def test_several_threads(rank_pool: Any) -> None:
    rank_pool(2).run(several_threads)


def memory_of(rank: int, world: int) -> tuple[int, int]:
    """Bytes of this rank's weights, shared pages by the ranks that have them, and state."""
    with process_group():
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        dist.barrier()
        copy_and_view = optimizer._weights._memory, optimizer._weights._view
        weights = sum(pss_at(memory.data_ptr()) for memory in copy_and_view)
        assert all(memory.nbytes > 4e6 for memory in copy_and_view)
        dist.barrier()
        mine = [
            each for state in optimizer._inner._optimizer.state.values() for each in state.values()
        ]
        plain = 3 * sum(parameter.nbytes for parameter in model.parameters())
        return weights + sum(tensor.nbytes for tensor in mine), plain


def pss_at(address: int) -> int:
    """The proportional share of the mapping at an address that is this process's."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found and line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no mapping")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_weights_and_state_of_a_node_are_those_of_one_process(rank_pool: Any, world: int) -> None:
    found = rank_pool(world).run(memory_of)
    node, alone = sum(mine for mine, _ in found), found[0][1]
    assert 0.9 * alone < node <= 1.1 * alone


def own_memory() -> int:
    """Bytes of this process that no other has."""
    return memory_in("status", "RssAnon")


def shared_memory() -> int:
    """Bytes of files in memory that this process has, a part of those that others have, too."""
    return memory_in("smaps_rollup", "Pss_Shmem")


def memory_in(file: str, kind: str) -> int:
    """Bytes of this process, as Linux counts them."""
    found = re.search(rf"^{kind}:\s+(\d+)", Path("/proc/self", file).read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def give_back(rank: int, world: int) -> None:
    """Values that were moved are not kept by malloc, which keeps what is freed by layers."""
    with process_group():
        torch.ones(2**23)  # from now on, malloc takes tensors of less than 32 MiB from its heap
        sharded(rank, torch.optim.SGD, lr=0.1)  # imports what it needs
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(40)))
        before = own_memory()
        _optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        assert own_memory() < before - 0.8 * sum(p.nbytes for p in model.parameters())


def test_moved_weights_leave_no_memory_behind(rank_pool: Any) -> None:
    rank_pool(2).run(give_back)


def close_and_keep(rank: int, world: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """As by a scheduler, which has its optimizer."""
    with process_group():
        model = nn.Linear(2048, 2048, dtype=dtype)
        dist.barrier()
        before = shared_memory()
        optimizer = ShardedOptimizer(model, torch.optim.AdamW, **options)
        model(torch.ones(2, 2048, dtype=dtype)).sum().backward()
        optimizer.step()
        during, state = shared_memory(), optimizer.state_dict()
        weights = copy.deepcopy(model.state_dict())
        optimizer.close()
        optimizer.zero_grad()
        dist.barrier()
        nbytes = model.weight.nbytes
        after = shared_memory()
        assert after - before < nbytes / 10 < nbytes < during - before, (before, during, after)
        assert_same(optimizer.state_dict()["state"], state["state"])
        assert_same(model.state_dict(), weights)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"by_parameter": True}),
        (torch.bfloat16, {"master_weights": True}),
    ],
    ids=["by element", "by parameter", "with masters"],
)
def test_a_closed_optimizer_keeps_its_state_only(
    rank_pool: Any, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    rank_pool(2).run(close_and_keep, dtype, options)


class Conjugated(nn.Module):
    """Gradients that are lazy conjugates, or lazy negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12_000, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.conj() * x).sum().abs()


def conjugate(rank: int, world: int) -> None:
    with process_group():
        for threads in 1, 2:
            torch.manual_seed(0)
            model = Conjugated()
            alone = copy.deepcopy(model)
            optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
            plain = torch.optim.SGD(alone.parameters(), lr=0.1)
            x = torch.randn(12_000, dtype=torch.complex64)
            with torch_threads(threads):
                for each, steps in (model, optimizer), (alone, plain):
                    each(x).backward()
                    steps.step()
            assert_same_weights(model, alone)


def test_conjugated_gradients(rank_pool: Any) -> None:
    rank_pool(2).run(conjugate)
