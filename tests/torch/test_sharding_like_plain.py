"""Programs that do between steps what they do with a plain optimizer."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.core import CollectiveMismatchError, SdpError
from sdp_plugins.torch import ShardedOptimizer
from tests.launch.jobs import launch_page
from tests.torch.jobs import assert_same, process_group
from tests.torch.sharded_nets import assert_same_weights, loss_of, make, plain, sharded


def differentiate(rank: int, world: int) -> None:
    """autograd.grad() between backward() and step() takes no gradient away."""
    for ranks in ((0,), (0, 1)):
        model = nn.Linear(300, 100, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=1.0)
        model(torch.ones(1, 300)).sum().backward()
        if rank in ranks:
            (gradient,) = torch.autograd.grad(model(torch.ones(1, 300)).sum(), model.weight)
            assert_same(gradient, torch.ones(100, 300))
        optimizer.step()
        assert_same(model.weight.detach(), -torch.ones(100, 300))


class SharedGradient(nn.Module):
    """Two weights whose gradients autograd yields as two views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(256, 256))
        self.vector = nn.Parameter(torch.zeros(65536))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.matrix.view(1, -1) + self.vector.view(1, -1))


def share_gradients(rank: int, world: int) -> None:
    """Two optimizers, each with its own buckets, and one of both weights."""
    for together in (False, True):
        model = SharedGradient()
        parts = [None] if together else [[model.matrix], [model.vector]]
        optimizers = [ShardedOptimizer(model, torch.optim.SGD, part, lr=1.0) for part in parts]
        model(torch.full((1, 65536), float(rank + 1))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_same(model.matrix.detach(), torch.full((256, 256), -1.5))
        assert_same(model.vector.detach(), torch.full((65536,), -1.5))


def keep_gradients(rank: int, world: int) -> None:
    """What this rank averages of large gradients is not copied; what a hook keeps is the hook's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(600, 64), nn.Linear(64, 512), nn.Linear(512, 256))
    for forward in (model, torch.compile(model, backend="aot_eager")):
        optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        seen: list[Tensor] = []
        hook = model[1].weight.register_hook(seen.append)
        (forward(torch.arange(5)).sum() * (1 + rank)).backward()
        hook.remove()
        assert optimizer._gradients._kept.keys() == ({3}, {0, 1, 3})[rank]
        mine = seen[0].clone()
        optimizer.step()
        assert_same(seen[0], mine)
        optimizer.close()


def assign_one_gradient(rank: int, world: int) -> None:
    """A program's own tensor, as the gradient of two parameters: it stays the program's."""
    model = SharedGradient()
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=1.0)
    mine = torch.full((65536,), float(rank + 1))
    model.vector.grad, model.matrix.grad = mine, mine.view(256, 256)
    optimizer.step()
    assert_same(mine, torch.full((65536,), float(rank + 1)))
    assert_same(model.matrix.detach(), torch.full((256, 256), -1.5))


def read_norms_on_one_rank(rank: int, world: int) -> None:
    """Is an error on all ranks at once, also after all have clipped."""
    ways: list[Callable[[Any, Any], object]] = [
        lambda model, optimizer: model.weight.grad.norm(2),
        lambda model, optimizer: optimizer.clip_grad_norm_(1.0, 1.0),
    ]
    first: list[Callable[[Any, Any], object]] = [
        lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model, optimizer: optimizer.clip_grad_norm_(1.0, float("inf")),
    ]
    for way in ways:
        for before in first:
            model = nn.Linear(4, 4)
            optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
            model(torch.ones(2, 4)).sum().backward()
            before(model, optimizer)
            with pytest.raises(RuntimeError, match=r"some ranks clip .*, and others do not"):
                way(model, optimizer) if rank == 0 else optimizer.step()
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


def clip_in_other_ways(rank: int, world: int) -> None:
    """One rank by norm, one by value."""
    model = nn.Linear(4, 4)
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    if rank != 0:
        optimizer.clip_grad_value_(1.0)
    with pytest.raises(RuntimeError, match=r"some ranks clip"):
        optimizer.clip_grad_norm_(1.0) if rank == 0 else optimizer.step()


def read_norms(rank: int, world: int) -> None:
    """In each spelling, after backward() and after clipping; and what needs no values."""
    ddp, _ = plain(rank, torch.optim.SGD, lr=0.1)
    model, _ = sharded(rank, torch.optim.SGD, lr=0.1)
    for each in (ddp, model):
        loss_of(each, rank, 0).backward()
    spellings: list[Callable[[Tensor], Tensor]] = [
        lambda gradient: gradient.norm(),
        torch.norm,
        torch.linalg.vector_norm,
        lambda gradient: gradient.norm(p=1),
        lambda gradient: gradient.data.norm(2.0),
    ]
    for norm in spellings:
        theirs, ours = (
            [norm(p.grad) for p in each.parameters() if p.grad is not None] for each in (ddp, model)
        )
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    for parameter in model.parameters():
        if (gradient := parameter.grad) is not None:
            assert gradient.shape == parameter.shape and gradient.numel() == parameter.numel()
            assert gradient.ndim == parameter.ndim and not gradient.requires_grad
            with pytest.raises(RuntimeError, match=r"^sum: gradients .* cannot be read"):
                gradient.sum()
            with pytest.raises(RuntimeError, match=r"^T: gradients"):
                _ = gradient.T


def fail_to_construct(rank: int, world: int) -> None:
    """The model is as it was, for another optimizer of either kind."""
    torch.manual_seed(0)
    model = nn.Linear(5, 7)
    before = copy.deepcopy(model.state_dict())
    refused = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: Any = refused.state
    state["mine"] = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        ShardedOptimizer(model, refused)
    for parameter in model.parameters():
        assert_same(parameter.detach(), before["weight" if parameter.ndim > 1 else "bias"])
    model(torch.ones(1, 5)).sum().backward()
    assert type(model.weight.grad) is Tensor
    model.zero_grad()
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()


def load_old_checkpoint(rank: int, world: int) -> None:
    """Steps as numbers, and groups without newer settings, as torch 1.11 has written them."""
    ddp, theirs = plain(rank, torch.optim.Adam, lr=0.1)
    model, ours = sharded(rank, torch.optim.Adam, lr=0.1)
    for step in range(3):
        for each, optimizer in ((ddp, theirs), (model, ours)):
            loss_of(each, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            state = copy.deepcopy(optimizer.state_dict())
            for values in state["state"].values():
                values["step"] = int(values["step"])
            for group in state["param_groups"]:
                del group["maximize"], group["fused"]
            optimizer.load_state_dict(state)
    assert_same_weights(model, ddp)


def differ_in_settings(rank: int, world: int) -> None:
    """Is an error on all ranks: each would update its part of every weight by its own."""
    changes: dict[str, Callable[[Any, Any], object]] = {
        r"lr of parameter group 0: 1\.0 on rank 0, 2\.0 on rank 1": (
            lambda optimizer, state: optimizer.param_groups[0].update(lr=1.0 + rank)
        ),
        r"weight_decay of parameter group 0: torch.float32 1\.0 on rank 0, torch.float32 1\.000": (
            lambda optimizer, state: optimizer.param_groups[0].update(
                weight_decay=torch.tensor(1.0 + rank * 1e-6)
            )
        ),
        r"states loaded: 1 on rank 0, 0 on rank 1": (
            lambda optimizer, state: optimizer.load_state_dict(state) if rank == 0 else None
        ),
    }
    for clips in (False, True):
        for text, change in changes.items():
            model = nn.Linear(64, 2)
            optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=1.0, momentum=0.9)
            state = optimizer.state_dict()
            change(optimizer, state)
            model(torch.ones(1, 64)).sum().backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with pytest.raises(RuntimeError, match=rf"step\(\): .*settings.*{text}.*Hint: "):
                optimizer.step()


def order_settings_differently(rank: int, world: int) -> None:
    """Groups with the same settings are alike."""
    model = nn.Linear(5, 7)
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=1.0)
    (group,) = optimizer.param_groups
    names = ["weight", "bias", "norm", "embedding"]
    group["names"] = set(names if rank else reversed(names))
    if rank:
        group["lr"] = group.pop("lr")
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()


def run_hooks_of_state(rank: int, world: int) -> None:
    """They see, and may change, the whole state."""
    model = nn.Linear(5, 7)
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    seen: list[Any] = []

    def double(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append(sorted(state["state"]))
        for values in state["state"].values():
            values["momentum_buffer"] = 2 * values["momentum_buffer"]
        return state

    before = optimizer.state_dict()["state"][0]["momentum_buffer"]
    hook = optimizer.register_state_dict_post_hook(double)
    saved = optimizer.state_dict()
    assert_same(saved["state"][0]["momentum_buffer"], 2 * before)
    hook.remove()
    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict()["state"][0]["momentum_buffer"], 4 * before)
    assert seen == [[0, 1], [0, 1], "loaded"]
    assert not optimizer.state


def use_after_close(rank: int, world: int) -> None:
    model = nn.Linear(5, 7)
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    state = optimizer.state_dict()
    optimizer.close()
    model(torch.ones(1, 5)).sum().backward()
    calls: dict[str, Callable[[], object]] = {
        "step": optimizer.step,
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(0.1),
        "clip_grad_value_": lambda: optimizer.clip_grad_value_(0.1),
        "load_state_dict": lambda: optimizer.load_state_dict(state),
        "synchronize_buffers": optimizer.synchronize_buffers,
        "no_sync": lambda: optimizer.no_sync().__enter__(),
    }
    for name, call in calls.items():
        with pytest.raises(
            RuntimeError, match=rf"^\[rank {rank}/2\] {name}\(\): this optimizer was closed"
        ):
            call()
    assert optimizer.state_dict() == state
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def clip_float64(rank: int, world: int) -> None:
    """In the precision of the gradients."""
    ddp = DistributedDataParallel(make(rank).double(), broadcast_buffers=False)
    model = make(rank).double()
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    random = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8, 3, 6, 6, generator=random, dtype=torch.float64)
    for each in (ddp, model):
        each(inputs).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
    found = optimizer.clip_grad_norm_(0.1)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-13)


def pass_wrong_arguments(rank: int, world: int) -> None:
    model = nn.Linear(5, 7)
    parameters: Any = model.parameters()
    with pytest.raises(TypeError, match=r"takes the model, .*, not generator"):
        ShardedOptimizer(parameters, torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match=r"reduces gradients itself.*without DistributedData"):
        ShardedOptimizer(DistributedDataParallel(model), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"weight is not initialized"):
        ShardedOptimizer(nn.LazyLinear(3), torch.optim.SGD, lr=0.1)
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"consolidate_state_dict\(\): .* no rank 5"):
        optimizer.consolidate_state_dict(5)
    other = torch.optim.SGD(nn.Linear(4, 7).parameters(), momentum=0.9)
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    other.step()
    with pytest.raises(ValueError, match=r"momentum_buffer of parameter 0 .*\(7, 4\).*\(7, 5\)"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(TypeError, match=r"cannot be copied.*state_dict\(\)"):
        copy.deepcopy(optimizer)


def load_what_others_wrote(rank: int, world: int) -> None:
    """Classes whose settings have the same names may load each other's, as the plain ones do."""
    kinds = torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adafactor
    states = [kind(nn.Linear(5, 7).parameters(), lr=0.1).state_dict() for kind in kinds]
    for kind, own in zip(kinds, states, strict=True):
        optimizer = ShardedOptimizer(nn.Linear(5, 7), kind, lr=0.2)
        for other in states:
            if other is own:
                continue
            with pytest.raises(
                ValueError, match=f"not of {kind.__name__}: it has no .*, but .* Hi"
            ):
                optimizer.load_state_dict(other)
            assert optimizer.param_groups[0]["lr"] == 0.2
        own["param_groups"][0].pop("weight_decay" if kind is torch.optim.SGD else "foreach", None)
        optimizer.load_state_dict(own)
        assert optimizer.param_groups[0]["lr"] == 0.1
    adamw = ShardedOptimizer(nn.Linear(5, 7), torch.optim.AdamW)
    adamw.load_state_dict(torch.optim.Adam(nn.Linear(5, 7).parameters(), lr=0.1).state_dict())


def make_it_alone(rank: int, world: int) -> None:
    text = (r"In ShardedOptimizer, this was the constructor: call it on all ranks\.", "barrier")
    construct = partial(ShardedOptimizer, nn.Linear(5, 7), torch.optim.SGD, lr=0.1)
    with pytest.raises(CollectiveMismatchError, match=text[rank]):
        construct() if rank == 0 else dist.all_reduce(torch.zeros(1))


def differ_in_construction(rank: int, world: int) -> None:
    """The first difference is told."""
    kinds = torch.optim.SGD, torch.optim.Adagrad
    cases: dict[str, Callable[[], object]] = {
        r"weight: float32\[7, 5\].* on rank 0, float32\[7, 6\].* on rank 1": lambda: (
            ShardedOptimizer(nn.Linear(5 + rank, 7), torch.optim.SGD, lr=0.1)
        ),
        r"lr of parameter group 0: 1\.0 on rank 0, 2\.0 on rank 1": (
            lambda: ShardedOptimizer(nn.Linear(5, 7), torch.optim.SGD, lr=1.0 + rank)
        ),
        r"optimizer: SGD on rank 0, Adagrad on rank 1": (
            lambda: ShardedOptimizer(nn.Linear(5, 7), kinds[rank], lr=0.1)
        ),
        r"bias: none on rank 0, float32\[7\], strides \[1\], trained on rank 1": lambda: (
            ShardedOptimizer(nn.Linear(5, 7, bias=rank == 1), torch.optim.SGD, lr=0.1)
        ),
    }
    for text, construct in cases.items():
        with pytest.raises(ValueError, match=text):
            construct()


def call_what_others_do_not(rank: int, world: int) -> None:
    """The error names what this rank has called, not only the core's operation."""
    model = nn.Linear(5, 7)
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    text = (r"step\(\)", r"state_dict\(\) or consolidate_state_dict\(\)")[rank]
    with pytest.raises(
        CollectiveMismatchError, match=rf"In ShardedOptimizer, this was {text}: call"
    ):
        optimizer.step() if rank == 0 else optimizer.state_dict()


def scale_in_place(rank: int, world: int) -> None:
    """As programs do that divide gradients by a number of words."""
    ddp, theirs = plain(rank, torch.optim.SGD, lr=0.1)
    model, ours = sharded(rank, torch.optim.SGD, lr=0.1)
    for step in range(2):
        for each, optimizer in ((ddp, theirs), (model, ours)):
            loss_of(each, rank, step).backward()
            for parameter in each.parameters():
                if parameter.grad is not None:
                    parameter.grad /= 3.0
                    parameter.grad.mul_(other=torch.full((1,), 5.0))
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, ddp)
    loss_of(model, rank, 0).backward()
    weight = next(p for p in model.parameters() if p.grad is not None and p.numel() > 1)
    with pytest.raises(RuntimeError, match=r"^mul_: gradients .* in the ranks' shards.*Hint: "):
        weight.grad *= torch.ones_like(weight)


def convert_afterwards(rank: int, world: int) -> None:
    model = nn.Linear(5, 7)
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model.to(torch.bfloat16)
    text = rf"\[rank {rank}/2\] (weight|bias) has become torch\.bfloat16\. Hint: convert .* before"
    with pytest.raises(RuntimeError, match=text):
        model(torch.ones(1, 5, dtype=torch.bfloat16)).sum().backward()
    optimizer.close()


def wrap_in_ddp(rank: int, world: int) -> None:
    """Gradients would be averaged twice."""
    model = nn.Linear(5, 7)
    optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    ddp = DistributedDataParallel(nn.Sequential(model, nn.ReLU()))
    with pytest.raises(RuntimeError, match=r"\[rank \d/2\] DistributedData.*of 0\.weight.*Hint: "):
        ddp(torch.ones(1, 5))
    with ddp.no_sync():
        ddp(torch.ones(1, 5))
    with torch.no_grad():
        ddp(torch.ones(1, 5))
    both = nn.Sequential(model, nn.Linear(7, 1))
    ignored = [f"0.{name}" for name, _ in model.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(both, ignored)
    DistributedDataParallel(both)(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    optimizer.close()
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(1, 5)).sum().backward()
    assert type(model.weight.grad) is Tensor


def have_no_group(rank: int, world: int) -> None:
    """Before init_process_group(), and after destroy_process_group()."""
    model = nn.Linear(5, 7)
    with process_group():
        optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 5)).sum().backward()
    for call in optimizer.step, optimizer.state_dict:
        with pytest.raises(SdpError, match=r"closed.*call it before destroy_process_group\(\)"):
            call()
    with pytest.raises(ValueError, match=r"needs a group of smddp\. Hint: call init_process_group"):
        ShardedOptimizer(nn.Linear(5, 7), torch.optim.SGD, lr=0.1)


def fail_in_a_subgroup(rank: int, world: int) -> None:
    """Messages have the ranks' numbers in the job."""
    with process_group():
        group = dist.new_group([1, 2])
        if rank > 0:
            model = nn.Linear(5, 7)
            if rank == 2:
                model.weight.data = model.weight.data[:, :4]
            whose = "on rank 2, " if rank == 1 else ""
            with pytest.raises(ValueError, match=rf": {whose}weight is a part of a tensor"):
                ShardedOptimizer(model, torch.optim.SGD, lr=0.1, group=group)
            optimizer = ShardedOptimizer(nn.Linear(5, 7), torch.optim.SGD, lr=0.1, group=group)
            optimizer.consolidate_state_dict(1)
            if rank == 1:
                with pytest.raises(RuntimeError, match=r"on rank 2\. .*_state_dict\(0\)"):
                    optimizer.state_dict()
            optimizer.close()
        dist.barrier()


def test_in_a_subgroup(rank_pool: Any) -> None:
    rank_pool(3).run(fail_in_a_subgroup)


def test_without_a_group(rank_pool: Any) -> None:
    rank_pool(2).run(have_no_group)


def test_the_program_of_the_page_runs_as_written(tmp_path: Path) -> None:
    losses = []
    for _ in range(2):  # the second goes on from the first one's checkpoint
        done = launch_page("sharding.md", tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(float(done.stdout.split()[-1]))
    assert losses[0] < 0.2
    assert losses[1] < losses[0] / 2
    saved = torch.load(tmp_path / "digits.pt")
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model.load_state_dict(saved["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(saved["optimizer"])


CASES = [
    load_what_others_wrote,
    make_it_alone,
    differ_in_construction,
    call_what_others_do_not,
    scale_in_place,
    convert_afterwards,
    wrap_in_ddp,
    differentiate,
    share_gradients,
    keep_gradients,
    assign_one_gradient,
    read_norms_on_one_rank,
    clip_in_other_ways,
    read_norms,
    fail_to_construct,
    load_old_checkpoint,
    differ_in_settings,
    order_settings_differently,
    run_hooks_of_state,
    use_after_close,
    clip_float64,
    pass_wrong_arguments,
]


def run_case(rank: int, world: int, index: int) -> None:
    with process_group():
        CASES[index](rank, world)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.__name__ for case in CASES])
def test_like_plain(rank_pool: Any, index: int) -> None:
    rank_pool(2).run(run_case, index)
