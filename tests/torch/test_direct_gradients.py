"""Layers that write large gradients into the buckets: the bits and the ways of autograd's own."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from sdp_plugins.torch import ShardedOptimizer
from sdp_plugins.torch.direct_gradients import DIRECT_NBYTES
from tests.torch.direct_nets import (
    LARGE,
    WAYS,
    WIDTH,
    WORDS,
    Layers,
    Text,
    changed_layers,
    make,
    twice,
    words,
    writes,
)
from tests.torch.jobs import assert_same, process_group
from tests.torch.sharded_nets import assert_same_weights


@contextmanager
def both_ways(**tolerance: float) -> Iterator[list[tuple[Text, torch.optim.Optimizer]]]:
    """A model with a ShardedOptimizer and one with a plain one, whose weights must end equal."""
    with process_group():
        ours, theirs = make(), make()
        sharded = ShardedOptimizer(ours, torch.optim.SGD, lr=0.1)
        yield [(ours, sharded), (theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))]
        assert_same_weights(ours, theirs, **tolerance)


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
        loss = ours(words(rank, 11))
        with torch.autocast("cpu", torch.bfloat16), writes(0):
            loss.backward()
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


def failed(layers: Layers, x: Tensor) -> Tensor:
    return layers(Fails.apply(layers(x)))


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
    with both_ways() as pairs:
        for model, optimizer in pairs:
            model(words(0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            hidden = sum(Hides.apply(p) for p in (model.wide.weight, model.small.bias))
            (model.embedding(torch.tensor([3, 4])).sum() + hidden).backward()
            Hides.apply(model.embedding.weight).backward()  # adds nothing to what is there
            optimizer.step()


def test_parameters_whose_gradient_is_none(rank_pool: Any) -> None:
    rank_pool(2).run(no_gradient)


def mixed_uses(rank: int, world: int) -> None:
    """A weight that a layer and other functions use has the gradients of both, in any order."""
    with both_ways(rtol=1e-5, atol=1e-7) as pairs:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
        for model, optimizer in pairs:
            for step in range(3):
                loss = functional.linear(model.wide(x), model.wide.weight).square().mean()
                early = functional.linear(x, model.bare.weight)
                inner = partial(functional.linear, weight=model.bare.weight)
                again = checkpoint(inner, x, use_reentrant=step != 1)
                late = checkpoint(model.bare, early + again, use_reentrant=step == 1)
                (loss + model.bare(late).square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()


def test_weights_with_other_uses(rank_pool: Any) -> None:
    rank_pool(2).run(mixed_uses)


def nested(rank: int, world: int, inner_first: bool) -> None:
    """A layer within a reentrant checkpoint and outside of it, which DDP does not allow."""
    with both_ways() as pairs:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for model, optimizer in pairs:
            for _ in range(2):
                if inner_first:
                    hidden = checkpoint(model.layers, model.layers(x), use_reentrant=True)
                else:
                    hidden = model.layers(checkpoint(model.layers, x, use_reentrant=True))
                hidden.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


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


class Tripled(Tensor):
    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return 3 * result if function is functional.linear else result


class Doubling(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        return 2 * result if function is functional.linear else result


def change(rank: int, world: int) -> None:
    """What a program does to layers, or to the functions that they call, it gets."""
    with process_group():
        pairs = [(make(), ShardedOptimizer), (make(), None)]
        found = []
        for model, kind in pairs:
            torch.manual_seed(1)
            model.other = nn.Linear(WIDTH, WIDTH)
            model.other.weight = nn.Parameter(model.other.weight.data.as_subclass(Tripled))
            model.other.weight.data.fill_(0.01)
            optimizer = kind(model, torch.optim.SGD, lr=0.1) if kind else None
            x = torch.ones(2, WIDTH, requires_grad=True)
            values = []
            loss = model.wide(torch.ones(2, WIDTH)).square().sum()
            with torch.no_grad():
                model.wide.weight.add_(0.1)  # which this gradient does not need
            with writes(int(model is pairs[0][0])):
                loss.backward()
            with writes(0):
                values.append(model.other(x).detach().as_subclass(Tensor))
                with forward_ad.dual_level():
                    dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
                    values.append(forward_ad.unpack_dual(model.wide(dual)).tangent)
                with Doubling():
                    values += torch.autograd.grad(model.wide(x).sum(), x)
                    values += torch.autograd.grad(model.wide(x).sum(), model.wide.weight)
                model.embedding.max_norm = 0.1
                values.append(model.embedding(torch.tensor([[1, 1, 2]])))
                model.embedding.max_norm, model.embedding.scale_grad_by_freq = None, True
                rows = model.embedding(torch.tensor([[1, 1, 2]]))
                values += torch.autograd.grad(rows.sum(), model.embedding.weight)
                nn.utils.parametrizations.spectral_norm(model.bare)
                values += [model.bare(x), model.bare.parametrizations.weight[0]._u]
                with mock.patch.object(functional, "linear", lambda *args: 5 * F_LINEAR(*args)):
                    values += torch.autograd.grad(model.wide(x).sum(), model.wide.weight)
            found.append(values)
            del optimizer
        for one, other in zip(*found, strict=True):
            assert_same(one, other)


F_LINEAR = functional.linear


def test_changed_layers_and_functions(rank_pool: Any) -> None:
    rank_pool(2).run(change)


def indices(rank: int, world: int) -> None:
    """Indices of other types, and more of them than there are words."""
    with both_ways() as pairs:
        for model, optimizer in pairs:
            for many, count in (torch.arange(9).int(), 1), (torch.arange(2 * WORDS) // 2, 0):
                with writes(count * (isinstance(optimizer, ShardedOptimizer))):
                    model.embedding(many).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()


def test_indices(rank_pool: Any) -> None:
    rank_pool(2).run(indices)


def find_anomalies(rank: int, world: int) -> None:
    with process_group():
        model = make()
        optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        with torch.autograd.detect_anomaly(check_nan=True), writes(0):
            loss = (model.bare(torch.full((1, WIDTH), torch.inf)) * 0).sum()
            with pytest.raises(RuntimeError, match="returned nan values"):
                loss.backward()
        optimizer.zero_grad()


def test_anomalies(rank_pool: Any) -> None:
    rank_pool(2).run(find_anomalies)


def penalize(rank: int, world: int) -> None:
    """Gradients of gradients, as of a penalty, in the step's own backward pass."""
    with both_ways(rtol=1e-5, atol=1e-6) as pairs:
        for model, optimizer in pairs:
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
            loss = model.layers(x.requires_grad_()).square().sum()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.layers(x).square().sum().backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()


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


def forms(rank: int, world: int) -> None:
    """Inputs that are no arrays, and those of which torch makes and adds up other products."""
    of_columns: list[Any] = []
    with both_ways() as pairs:
        for model, optimizer in pairs:
            ours = int(isinstance(optimizer, ShardedOptimizer))
            x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
            parts = x.view(2, 3, WIDTH).transpose(0, 1)
            columns = x.t().contiguous().t().requires_grad_()
            inputs = [
                (x.to_sparse(), 0),
                (x.to_sparse_csr(), 0),
                (x.to_mkldnn(), 0),
                (torch.nested.nested_tensor([x[:2], x[2:]]), 0),
                (columns, 0),
                (parts, ours),
            ]
            for given, count in inputs:
                found = model.wide(given)
                if given.is_nested:
                    found = torch.nested.to_padded_tensor(found, 0.0)
                elif found.is_mkldnn:
                    found = found.to_dense()
                with writes(count):
                    (found.transpose(0, -1).contiguous().sin() * 0.1).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            of_columns.append(columns.grad)
        assert_same(*of_columns)


def test_forms_of_inputs(rank_pool: Any) -> None:
    rank_pool(2).run(forms)


# ---- the layers ---------------------------------------------------------------------------------


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
                "complex": nn.Linear(WIDTH, WIDTH, dtype=torch.complex64),
                "patched": nn.Linear(WIDTH, WIDTH),
            }
        )
        patched = model.other["patched"]
        patched.forward = own = partial(nn.Linear.forward, patched)
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
    with both_ways(rtol=1e-5, atol=1e-6) as pairs:
        for model, optimizer in pairs:
            whole = torch.compile(
                model, backend="aot_eager", fullgraph=isinstance(optimizer, ShardedOptimizer)
            )
            with writes(0):
                for step in range(2):
                    whole(words(0, step)).backward()
                    optimizer.step()
                    optimizer.zero_grad()


def test_compiled_models(rank_pool: Any) -> None:
    rank_pool(2).run(compiled, timeout_s=160)
