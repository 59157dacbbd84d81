"""Layers that write large gradients into the buckets: the bits and the ways of autograd's own."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sdp_plugins.torch import ShardedOptimizer, write_into_buckets
from sdp_plugins.torch.direct_gradients import DIRECT_NBYTES, Destination
from tests.torch.jobs import assert_same, process_group
from tests.torch.sharded_nets import assert_same_weights

WIDTH, WORDS = 512, 530
LARGE = ["embedding.weight", "wide.weight", "bare.weight"]


class Text(nn.Module):
    """An embedding with padding, whose weight is also that of the last layer, and layers between.

    Args:
        how: Calls the layers between.
    """

    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.wide = nn.Linear(WIDTH, WIDTH)
        self.bare = nn.Linear(WIDTH, WIDTH, bias=False)
        self.small = nn.Linear(WIDTH, 3)
        self.scores = nn.Linear(WIDTH, WORDS)
        self.scores.weight = self.embedding.weight
        self.how = how

    def layers(self, x: Tensor) -> Tensor:
        return self.wide(torch.tanh(self.bare(x)))  # type: ignore[no-any-return]

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.how(self.layers, self.embedding(words))
        loss = functional.cross_entropy(self.scores(hidden).view(-1, WORDS), words.flatten())
        return loss + self.small(hidden).square().mean()


def make(how: Any = None) -> Text:
    torch.manual_seed(0)
    return Text(how or every_layer)


def words(rank: int, step: int, shape: tuple[int, ...] = (2, 5)) -> Tensor:
    """Few words, so that some come twice; and the padding."""
    random = torch.Generator().manual_seed(100 * step + rank)
    found = torch.randint(1, 9, shape, generator=random)
    found.view(-1)[:-1:2] = 0
    return found


@contextmanager
def writes(count: int | None = None) -> Iterator[list[bool]]:
    """What layers are told that want to write: whether they may; so many of them have."""
    told: list[bool] = []
    plain = Destination.open

    def opened(destination: Destination) -> Any:
        told.append((found := plain(destination)) is not None)
        return found

    with mock.patch.object(Destination, "open", opened):
        yield told
    assert count is None or sum(told) == count


def every_layer(layers: Any, x: Tensor) -> Tensor:
    return layers(x)  # type: ignore[no-any-return]


def no_layer(layers: Any, x: Tensor) -> Tensor:
    return x


def twice(layers: Any, x: Tensor) -> Tensor:
    return layers(layers(x))  # type: ignore[no-any-return]


def again(layers: Any, x: Tensor, use_reentrant: bool) -> Tensor:
    return checkpoint(layers, x, use_reentrant=use_reentrant)  # type: ignore[no-any-return]


def in_place(layers: Any, x: Tensor) -> Tensor:
    return layers(x.mul_(2)).relu_()  # type: ignore[no-any-return]


def transposed(layers: Any, x: Tensor) -> Tensor:
    return layers(x.transpose(0, 1)).transpose(0, 1)  # type: ignore[no-any-return]


checkpointed = partial(again, use_reentrant=False)
WAYS: list[tuple[Any, tuple[int, ...]]] = [
    (None, (2, 5)),
    (None, (7,)),
    (None, ()),
    (None, (2, 3, 5)),
    (twice, (2, 5)),
    (in_place, (2, 5)),
    (in_place, (2, 3, 5)),
    (transposed, (2, 5)),
    (checkpointed, (2, 5)),
    (partial(again, use_reentrant=True), (2, 5)),
]


def train_both(rank: int, ours: Text, theirs: Text, shape: tuple[int, ...]) -> None:
    """Train under DDP and sharded, and compare the weights, bit by bit."""
    ddp = DistributedDataParallel(theirs)
    plain = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    sharded = ShardedOptimizer(ours, torch.optim.AdamW, lr=1e-3)
    for wrapped, optimizer in (ddp, plain), (ours, sharded):
        for step in range(3):
            wrapped(words(rank, step, shape)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(ours, theirs)


def like_ddp(rank: int, world: int, how: Any, shape: tuple[int, ...]) -> None:
    with process_group(), writes() as told:
        train_both(rank, make(how), make(how), shape)
        layers = 2 + 2 * (2 if how is twice else 1)  # one weight is written twice
        assert told == [True] * 3 * layers


@pytest.mark.parametrize(("how", "shape"), WAYS, ids=str)
def test_like_ddp(rank_pool: Any, how: Any, shape: tuple[int, ...]) -> None:
    rank_pool(2).run(like_ddp, how, shape)


def accumulate(rank: int, world: int) -> None:
    with process_group():
        ours, theirs = make(), make()
        ddp = DistributedDataParallel(theirs)
        plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
        sharded = ShardedOptimizer(ours, torch.optim.SGD, lr=0.1)
        for wrapped, optimizer, no_sync in (
            (ddp, plain, ddp.no_sync),
            (ours, sharded, sharded.no_sync),
        ):
            for step in range(3):
                with no_sync(), writes(0):
                    wrapped(words(rank, 2 * step)).backward()
                with writes(0):
                    wrapped(words(rank, 2 * step + 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(ours, theirs)
        with writes(4):
            ours(words(rank, 8)).backward()
        with writes(0):  # adds to the first, which has become this rank's alone
            ours(words(rank, 9)).backward()
        ours.small.weight.grad, norm = None, sharded.clip_grad_norm_(0.5)
        assert norm > 0.5
        sharded.zero_grad()
        with writes(4):
            ours(words(rank, 10)).backward()
        sharded.step()


def test_accumulation(rank_pool: Any) -> None:
    rank_pool(2).run(accumulate)


def dropped_after_clipping(rank: int, world: int) -> None:
    """Then the memory has averages of gradients that no step has used."""
    with process_group():
        models = make(), make()
        optimizers = [ShardedOptimizer(each, torch.optim.SGD, lr=0.1) for each in models]
        models[0](words(rank, 0)).backward()
        optimizers[0].clip_grad_norm_(0.1)
        for parameter in models[0].parameters():
            parameter.grad = None
        for model, optimizer in zip(models, optimizers, strict=True):
            model.bare(torch.ones(rank + 1, WIDTH)).square().sum().backward()
            optimizer.step()
        assert_same_weights(*models)


def test_gradients_dropped_after_clipping(rank_pool: Any) -> None:
    rank_pool(2).run(dropped_after_clipping)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if FAILS:
            raise FAILS.pop()
        return gradient


FAILS: list[Exception] = []


def failed(layers: Any, x: Tensor) -> Tensor:
    return layers(Fails.apply(layers(x)))  # type: ignore[no-any-return]


def fail(rank: int, world: int, drop: str) -> None:
    """What a backward pass has written before it failed is no part of the next one's gradients."""
    with process_group():
        FAILS.append(ArithmeticError())
        model, expected = make(failed), make(twice)
        optimizers = [ShardedOptimizer(m, torch.optim.SGD, lr=0.1) for m in (model, expected)]
        with writes(3), pytest.raises(ArithmeticError):  # two layers, and a half of one weight's
            (loss := model(words(rank, 0))).backward(retain_graph=True)
        (model if drop == "model" else optimizers[0]).zero_grad()
        if drop == "optimizer":  # the same graph again
            loss.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            expected(words(rank, 0)).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        for each, optimizer in zip((model, expected), optimizers, strict=True):
            elsewhere = functional.linear(torch.ones(3, WIDTH), each.wide.weight).square().mean()
            (each.scores(each.embedding(words(rank, 1))).square().mean() + elsewhere).backward()
            optimizer.step()
            optimizer.zero_grad()
            each(words(rank, 2)).backward()
            optimizer.step()
        assert_same_weights(model, expected)


@pytest.mark.parametrize("drop", ["model", "optimizer"])
def test_a_pass_that_fails(rank_pool: Any, drop: str) -> None:
    rank_pool(2).run(fail, drop)


class Hides(torch.autograd.Function):
    """Autograd comes to its argument, but with no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # type: ignore[override]
        return None


def no_gradient(rank: int, world: int) -> None:
    with process_group():
        ours, theirs = make(), make()
        sharded = ShardedOptimizer(ours, torch.optim.SGD, lr=0.1)
        plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for model, optimizer in (ours, sharded), (theirs, plain):
            model(words(0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            hidden = sum(Hides.apply(p) for p in (model.wide.weight, model.small.bias))
            (model.embedding(torch.tensor([3, 4])).sum() + hidden).backward()
            Hides.apply(model.embedding.weight).backward()  # adds nothing to what is there
            optimizer.step()
        assert_same_weights(ours, theirs)


def test_parameters_whose_gradient_is_none(rank_pool: Any) -> None:
    rank_pool(2).run(no_gradient)


def mixed_uses(rank: int, world: int) -> None:
    """A weight that a layer and other functions use has the gradients of both, in any order."""
    with process_group():
        ours, theirs = make(), make()
        sharded = ShardedOptimizer(ours, torch.optim.SGD, lr=0.1)
        plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
        for model, optimizer in (ours, sharded), (theirs, plain):
            for step in range(3):
                loss = functional.linear(model.wide(x), model.wide.weight).square().mean()
                early = functional.linear(x, model.bare.weight)
                inner = partial(functional.linear, weight=model.bare.weight)
                again = checkpoint(inner, x, use_reentrant=step != 1)
                late = checkpoint(model.bare, early + again, use_reentrant=step == 1)
                (loss + model.bare(late).square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(ours, theirs, rtol=1e-5, atol=1e-7)


def test_weights_with_other_uses(rank_pool: Any) -> None:
    rank_pool(2).run(mixed_uses)


def nested(rank: int, world: int, inner_first: bool) -> None:
    """A layer within a reentrant checkpoint and outside of it, which DDP does not allow."""
    with process_group():
        ours, theirs = make(), make()
        sharded = ShardedOptimizer(ours, torch.optim.SGD, lr=0.1)
        plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for model, optimizer in (ours, sharded), (theirs, plain):
            for _ in range(2):
                if inner_first:
                    hidden = checkpoint(model.layers, model.layers(x), use_reentrant=True)
                else:
                    hidden = model.layers(checkpoint(model.layers, x, use_reentrant=True))
                hidden.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(ours, theirs)


@pytest.mark.parametrize("inner_first", [False, True])
def test_nested_backward_passes(rank_pool: Any, inner_first: bool) -> None:
    rank_pool(2).run(nested, inner_first)


# ---- autograd that asks for something else ------------------------------------------------------


def total_of(model: Text, x: Tensor) -> Tensor:
    return model.layers(x).sum()


def ask(rank: int, world: int) -> None:
    """What a program asks autograd for it gets, and the step's gradients do not change."""
    with process_group():
        ours, theirs = make(), make()
        optimizer = ShardedOptimizer(ours, torch.optim.SGD, lr=0.1)
        x = torch.randn(4, WIDTH, requires_grad=True)
        found: list[list[Tensor]] = []
        for model in ours, theirs:
            with writes(0):
                loss = model.layers(x).square().sum()
                of_input = torch.autograd.grad(loss, x, retain_graph=True)
                of_weight = torch.autograd.grad(loss, [model.wide.weight, x], retain_graph=True)
                loss.backward(inputs=[model.bare.weight.new_empty(0).requires_grad_(), x])
                of_each = torch.func.vmap(torch.func.grad(partial(total_of, model)))(x)
                parameters = dict(model.named_parameters())
                swapped = {name: p.detach() * 2 for name, p in parameters.items()}
                called = torch.func.functional_call(model, swapped, (words(0, 0),))
                with torch.autocast("cpu", torch.bfloat16):
                    cast = model(words(0, 0))
                of_cast = torch.autograd.grad(cast, model.wide.weight)
                traced = torch.jit.trace(model.wide, x)(x)
            (penalty,) = torch.autograd.grad(model.layers(x).sum(), x, create_graph=True)
            of_penalty = torch.autograd.grad(penalty.square().sum(), [model.bare.weight, x])
            found.append(
                [*of_input, *of_weight, *of_each, called, cast, *of_cast, traced, *of_penalty]
            )
            x.grad = None
        for one, other in zip(*found, strict=True):
            assert_same(one, other)
        assert all(p.grad is None for p in ours.parameters())
        before = ours.wide.weight.clone()
        optimizer.step()
        assert_same(ours.wide.weight, before)


def test_other_derivatives(rank_pool: Any) -> None:
    rank_pool(2).run(ask)


def penalize(rank: int, world: int) -> None:
    """Gradients of gradients, as of a penalty, in the step's own backward pass."""
    with process_group():
        ours, theirs = make(), make()
        sharded = ShardedOptimizer(ours, torch.optim.SGD, lr=0.1)
        plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for model, optimizer in (ours, sharded), (theirs, plain):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
            loss = model.layers(x.requires_grad_()).square().sum()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.layers(x).square().sum().backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(ours, theirs, rtol=1e-5, atol=1e-6)


def test_penalties_of_gradients(rank_pool: Any) -> None:
    rank_pool(2).run(penalize)


def hook(rank: int, world: int) -> None:
    """Hooks on parameters see this rank's gradients."""
    with process_group():
        ours, theirs = make(), make()
        optimizer = ShardedOptimizer(ours, torch.optim.SGD, lr=0.1)
        found: list[list[Tensor]] = [[], []]
        for model, seen in zip((ours, theirs), found, strict=True):
            loss = model(words(rank, 0))
            for name in LARGE:
                model.get_parameter(name).register_hook(lambda g, seen=seen: seen.append(g.clone()))
            with writes(0):
                loss.backward()
        assert len(found[0]) == len(LARGE)
        optimizer.step()
        for one, other in zip(*found, strict=True):
            assert_same(one, other)


def test_hooks_of_parameters(rank_pool: Any) -> None:
    rank_pool(2).run(hook)


# ---- DistributedDataParallel --------------------------------------------------------------------


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
                assert sum(told) == len(told) / 7  # in steps 2 and 6, with gradients of None
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


def leave_buckets(rank: int, world: int) -> None:
    """Nothing is left of a model that is not used any more, nor after leaving."""
    with process_group():
        copies = DistributedDataParallel(make())
        with pytest.raises(ValueError, match="gradient_as_bucket_view=True"):
            write_into_buckets(copies)
        ddp = DistributedDataParallel(make(), gradient_as_bucket_view=True)
        direct = write_into_buckets(ddp)
        assert len(changed_layers(ddp)) == 4
        ddp(words(rank, 0)).backward()
        direct.leave()
        assert not changed_layers(ddp)
        with writes(0):
            ddp(words(rank, 1)).backward()
        ddp = wrap(make(), writes_directly=True)
        for step in range(2):
            ddp(words(rank, step)).backward()
            ddp.zero_grad()
        gone = [weakref.ref(each) for each in (ddp, ddp.module, ddp.module.wide.weight)]
        del ddp
        gc.collect()
        assert [each() for each in gone] == [None] * 3


def test_leaving_buckets(rank_pool: Any) -> None:
    rank_pool(2).run(leave_buckets)


# ---- the layers ---------------------------------------------------------------------------------


def changed_layers(model: nn.Module) -> set[str]:
    return {name for name, layer in model.named_modules() if "forward" in layer.__dict__}


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def choose(rank: int, world: int) -> None:
    """Only layers of which all is known, with large weights, until the optimizer is closed."""
    with process_group():
        model = make()
        model.other = nn.ModuleDict(
            {
                "doubled": Doubled(WIDTH, WIDTH),
                "sparse": nn.Embedding(WORDS, WIDTH, sparse=True),
                "limited": nn.Embedding(WORDS, WIDTH, max_norm=1.0),
                "scaled": nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True),
                "frozen": nn.Linear(WIDTH, WIDTH).requires_grad_(False),
                "patched": nn.Linear(WIDTH, WIDTH),
            }
        )
        patched = model.other["patched"]
        patched.forward = own = patched.forward
        assert patched.weight.nbytes >= DIRECT_NBYTES
        theirs = {"other.patched"}
        optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        assert changed_layers(model) == {"embedding", "wide", "bare", "scores"} | theirs
        assert patched.forward == own
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model.wide, file)
        assert b"sdp_plugins" not in file.getvalue()
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        x = torch.randn(3, WIDTH)
        with writes(0):
            for layer in copied.wide, loaded:
                expected = functional.linear(x, model.wide.weight, model.wide.bias)
                assert_same(layer(input=x), expected)
                layer.weight.data.zero_()
                assert_same(layer(x), layer.bias.expand(3, -1))
                layer(x).sum().backward()
                assert layer.weight.grad is not None
        optimizer.close()
        assert changed_layers(model) == theirs
        with writes(0):
            model(words(0, 0)).backward()
        assert model.wide.weight.grad is not None


def test_which_layers(rank_pool: Any) -> None:
    rank_pool(2).run(choose)


def compiled(rank: int, world: int) -> None:
    with process_group():
        ours, theirs = make(), make()
        sharded = ShardedOptimizer(ours, torch.optim.SGD, lr=0.1)
        plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for model, optimizer in (ours, sharded), (theirs, plain):
            whole = torch.compile(model, backend="aot_eager", fullgraph=model is ours)
            with writes(0):
                for step in range(2):
                    whole(words(0, step)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        assert_same_weights(ours, theirs, rtol=1e-5, atol=1e-6)


def test_compiled_models(rank_pool: Any) -> None:
    rank_pool(2).run(compiled, timeout_s=160)
