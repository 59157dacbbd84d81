"""Ranks that train by themselves between outer steps."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.core import CollectiveMismatchError, PeerLostError
from sdp_plugins.core.local_updates import fragment, updates
from sdp_plugins.core.local_updates.schedule import Schedule
from sdp_plugins.torch import LocalUpdates, OuterStep, ShardedOptimizer
from tests.faults import stay_away
from tests.ranks import Pool, Start, say
from tests.torch.jobs import process_group

RANKS = 2
FORMS: dict[str, dict[str, Any]] = {
    "average": {"every": 3, "outer": "average"},
    "nesterov": {"every": 4, "outer": "nesterov"},
    "other outer step": {"every": 2, "outer": OuterStep(0.5, 0.3)},
    "fragments": {"every": 6, "fragments": 3, "outer": "nesterov"},
    "delay": {"every": 5, "delay": 2},
    "streaming": {"every": 7, "fragments": 3, "delay": 2, "outer": "nesterov"},
}

PARTS = {1: [[0, 1, 2, 3, 4, 5, 6]], 3: [[3], [0, 2, 4], [1, 5, 6]]}
"""Indices of `Net`'s trained parameters by fragment: 160, 128 and 128 values."""


class Net(nn.Module):
    """Parameters of different sizes, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(5, 20, bias=False)
        self.layers = nn.Sequential(
            first, nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 8), nn.Linear(8, 12)
        )
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def make(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * rank + step)
        inputs = torch.randn(8, 5, generator=generator)
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trainable(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextmanager
def local_updates(model: nn.Module, optimizer: Any, **form: Any) -> Iterator[LocalUpdates]:
    with process_group():
        local = LocalUpdates(model, optimizer, **form)
        yield local
        local.close()


# ---- what it computes ----------------------------------------------------------------------------


class Expected:
    """The same in one process, with torch's optimizer for the outer steps."""

    def __init__(self, schedule: Schedule, outer: OuterStep) -> None:
        self.schedule = schedule
        self.replicas = [make() for _ in range(RANKS)]
        anchors = [parameter.detach().clone() for parameter in trainable(self.replicas[0][0])]
        self.anchors = anchors
        nesterov = outer.momentum > 0
        self.outer = [
            torch.optim.SGD([x], lr=outer.lr, momentum=outer.momentum, nesterov=nesterov)
            for x in anchors
        ]
        self.on_the_way: tuple[int, int, dict[int, list[Tensor]]] | None = None
        self.steps = 0

    def run(self, steps: int) -> None:
        for step in range(steps):
            for rank, (model, optimizer) in enumerate(self.replicas):
                train(model, optimizer, rank, range(step, step + 1))
            self.steps += 1
            if self.on_the_way and self.steps >= self.on_the_way[0]:
                self.arrive()
            fragment = self.schedule.begins(self.steps)
            if fragment is not None:
                self.send(fragment, self.schedule.delay)

    def send(self, fragment: int, delay: int) -> None:
        sent: dict[int, list[Tensor]] = {}
        for index in PARTS[self.schedule.fragments][fragment]:
            anchor = self.anchors[index]
            models = [trainable(model)[index].detach().clone() for model, _ in self.replicas]
            anchor.grad = sum(anchor - model for model in models) / RANKS
            self.outer[index].step()
            sent[index] = models
        self.on_the_way = self.steps + delay, fragment, sent
        if not delay:
            self.arrive()

    @torch.no_grad()
    def arrive(self) -> None:
        assert self.on_the_way is not None
        _, fragment, sent = self.on_the_way
        for index, models in sent.items():
            for (model, _), before in zip(self.replicas, models, strict=True):
                trainable(model)[index].add_(self.anchors[index] - before)
        if fragment == self.schedule.fragments - 1:
            first = list(self.replicas[0][0].buffers())
            for model, _ in self.replicas:
                for mine, his in zip(model.buffers(), first, strict=True):
                    mine.copy_(his)
        self.on_the_way = None


def run_form(rank: int, world: int, form: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    model, optimizer = make(seed=rank)
    with local_updates(model, optimizer, **form):
        train(model, optimizer, rank, range(20))
    return [p.detach() for p in trainable(model)], list(model.buffers())


@pytest.mark.parametrize("name", FORMS)
def test_like_one_process(rank_pool: Pool, name: str) -> None:
    form = dict(FORMS[name])
    outer = OuterStep.parse(form.get("outer", "average"))
    schedule = Schedule(form["every"], form.get("fragments", 1), form.get("delay", 0))
    expected = Expected(schedule, outer)
    expected.run(20)
    found = rank_pool(RANKS).run(run_form, form)
    for (parameters, buffers), (model, _) in zip(found, expected.replicas, strict=True):
        for mine, wanted in zip(parameters, trainable(model), strict=True):
            torch.testing.assert_close(mine, wanted.detach(), rtol=1e-5, atol=1e-6)
        for mine, wanted in zip(buffers, model.buffers(), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def run_pieces(rank: int, world: int, length: int) -> list[Tensor]:
    torch.manual_seed(rank)
    model = nn.Linear(5, 200)  # 1200 values, of which each rank has 768 with padding
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        mock.patch.object(fragment, "PIECE", length),
        local_updates(model, optimizer, every=2, outer="nesterov", wire="int8"),
    ):
        train(model, optimizer, rank, range(6))
    return [parameter.detach() for parameter in model.parameters()]


def test_the_length_of_pieces_changes_nothing(rank_pool: Pool) -> None:
    whole = rank_pool(RANKS).run(run_pieces, 2**20)
    for length in (256, 512):
        for ours, theirs in zip(rank_pool(RANKS).run(run_pieces, length), whole, strict=True):
            assert all(map(torch.equal, ours, theirs))


def run_every_step(rank: int, world: int, ddp: bool, exact: bool) -> list[Tensor]:
    """Averages in every step: of parameters, or of gradients."""
    torch.manual_seed(rank)
    model: nn.Module = nn.Linear(8, 4) if exact else nn.Sequential(nn.Linear(5, 30), nn.Tanh())
    if exact:  # multiples of powers of two, on which no operation rounds
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
    trained: Any = model
    with process_group():
        optimizer: Any = torch.optim.SGD(model.parameters(), 2**-6, 0.0 if exact else 0.9)
        if ddp:
            trained = DistributedDataParallel(model)
        else:
            LocalUpdates(model, optimizer, every=1, outer="average")
        for step in range(6 if exact else 30):
            generator = torch.Generator().manual_seed(10 * rank + step)
            width = 8 if exact else 5
            inputs = torch.randint(-2, 3, (4, width), generator=generator).float()
            output = trained(inputs)
            (output.sum() if exact else output.pow(2).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("exact", [True, False])
def test_an_average_in_every_step_of_sgd_is_ddp(rank_pool: Pool, exact: bool) -> None:
    local = rank_pool(RANKS).run(run_every_step, False, exact)
    ddp = rank_pool(RANKS).run(run_every_step, True, exact)
    for mine, theirs in zip(local, ddp, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(a, b, **tolerance)


def run_low_precision(rank: int, world: int) -> Any:
    torch.manual_seed(rank)
    model = nn.Linear(30, 20, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with local_updates(model, optimizer, every=2) as local:
        for _ in range(4):
            model(torch.randn(4, 30, dtype=torch.bfloat16)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        local.synchronize()
        return model.weight.dtype, model.weight.detach().float()


def test_16_bit_parameters(rank_pool: Pool) -> None:
    (dtype, first), (_, second) = rank_pool(RANKS).run(run_low_precision)
    assert dtype == torch.bfloat16 and torch.equal(first, second)


def run_no_progress(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(30, 20, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with local_updates(model, optimizer, every=1, outer="average") as local:
        model(torch.randn(4, 30, dtype=torch.bfloat16)).pow(2).sum().backward()
        optimizer.step()
        (anchor,) = local.state_dict()["anchors"]
        optimizer.zero_grad()
        optimizer.step()
        assert torch.equal(local.state_dict()["anchors"][0], anchor)
        assert not torch.equal(anchor, anchor.bfloat16().float())


def test_rounding_of_16_bit_parameters_is_no_progress(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_no_progress)


def policies() -> dict[int, int]:
    found = {}
    for task in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has just ended
            found[task] = os.sched_getscheduler(task)
    return found


def run_background(rank: int, world: int) -> list[int]:
    """Policies of the threads that the local updates have started, and of an exchange."""
    model, optimizer = make()
    exchange = fragment.Fragment.exchange
    found = []

    def watched(*args: Any) -> None:
        found.append(os.sched_getscheduler(0))
        known.add(threading.get_native_id())  # it may be listed until after its exchange
        exchange(*args)

    with process_group(), mock.patch.object(fragment.Fragment, "exchange", watched):
        known = set(policies())
        local = LocalUpdates(model, optimizer, every=2, delay=1)
        train(model, optimizer, rank, range(3))
        found += [policy for task, policy in policies().items() if task not in known]
        local.close()
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    return found


def test_exchanges_do_not_interrupt_the_training(rank_pool: Pool) -> None:
    for found in rank_pool(RANKS).run(run_background):
        assert found == [os.SCHED_BATCH]


# ---- ends and checkpoints ------------------------------------------------------------------------


def run_synchronize(rank: int, world: int, form: dict[str, Any]) -> list[Tensor]:
    model, optimizer = make(seed=rank)
    with local_updates(model, optimizer, **form) as local:
        train(model, optimizer, rank, range(8))
        local.synchronize()
        assert local.steps == 8
        state = [*model.parameters(), *model.buffers()]
        whole = [x.detach().clone() for x in state]
        local.synchronize()  # changes nothing
        for mine, before in zip(state, whole, strict=True):
            torch.testing.assert_close(mine, before, rtol=1e-6, atol=1e-7)
        local.close()
        train(model, optimizer, rank, range(8, 12))  # alone
    return whole


@pytest.mark.parametrize("name", ["average", "streaming"])
def test_synchronize_makes_all_ranks_equal(rank_pool: Pool, name: str) -> None:
    first, second = rank_pool(RANKS).run(run_synchronize, FORMS[name])
    assert all(map(torch.equal, first, second))


def run_resumed(rank: int, world: int, form: dict[str, Any], folder: str, at: int) -> bool:
    """Whether a training that goes on from this rank's checkpoint ends with the same bits."""
    model, optimizer = make(seed=rank)
    parts = {"model": model, "optimizer": optimizer}
    with process_group():
        parts["local"] = local = LocalUpdates(model, optimizer, **form)
        train(model, optimizer, rank, range(at))
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state, f"{folder}/{rank}.pt")
        train(model, optimizer, rank, range(at, 25))
        local.synchronize()
        other, optimizer = make(seed=5)
        again: Any = LocalUpdates(other, optimizer, **form)
        loaded = torch.load(f"{folder}/{rank}.pt")
        for name, part in (("model", other), ("optimizer", optimizer), ("local", again)):
            part.load_state_dict(loaded[name])
        train(other, optimizer, rank, range(at, 25))
        again.synchronize()
        mine = [*model.state_dict().values()]
        return all(map(torch.equal, mine, other.state_dict().values()))


@pytest.mark.parametrize("at", [5, 6, 10])
@pytest.mark.parametrize("name", ["nesterov", "streaming"])
def test_resumed_exactly(rank_pool: Pool, tmp_path: Any, name: str, at: int) -> None:
    assert rank_pool(RANKS).run(run_resumed, FORMS[name], str(tmp_path), at) == [True] * RANKS


def run_foreign_states(rank: int, world: int) -> None:
    model, optimizer = make()
    with local_updates(model, optimizer, every=4) as local:
        state = local.state_dict()
        match = r"rank 0: .* whose rank is 1, not 0; rank 1: .*not 1\. Hint: save a state on each"
        with pytest.raises(CollectiveMismatchError, match=match):
            local.load_state_dict({**state, "rank": 1 - rank})
        train(model, optimizer, rank, range(rank))
        match = r"rank 0: load_state_dict\(\) of step 0, .*; rank 1: load_state_dict\(\) of step 1"
        with pytest.raises(CollectiveMismatchError, match=match):
            local.load_state_dict(local.state_dict())
        for name in state:
            rest = {other: value for other, value in state.items() if other != name}
            match = f"no state of local updates: it lacks '{name}'"
            with pytest.raises(ValueError, match=match):
                local.load_state_dict(rest)
            with pytest.raises(CollectiveMismatchError, match=match):
                local.load_state_dict(rest if rank else state)
        with pytest.raises(ValueError, match="no state of local updates"):
            local.load_state_dict(optimizer.state_dict())
        other = LocalUpdates(*make(), every=5)
        with pytest.raises(ValueError, match=r"settings is Schedule\(every=4.*not .*every=5"):
            other.load_state_dict(state)


def test_states_of_others_are_refused(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_foreign_states)


# ---- misuse and failures -------------------------------------------------------------------------


def run_misuse(rank: int, world: int) -> None:
    model, optimizer = make()
    with process_group():

        def refused(match: str, model: Any = model, **form: Any) -> None:
            with pytest.raises(ValueError, match=match):
                LocalUpdates(model, optimizer, **form)

        refused("every=0", every=0)
        refused("every=2, fragments=3: every fragment needs a step", every=2, fragments=3)
        refused("Hint: a delay from 0 to 2 steps", every=6, fragments=3, delay=3)
        refused("outer='adam': it must be 'average' or 'nesterov'", outer="adam")
        refused("outer=None: it must be", outer=None)
        refused("wire='int3' cannot be used. Hint: int8, int4", wire="int3")
        refused("wire='int8 feedback' cannot be used", wire="int8 feedback")
        refused("wire=8 cannot be used. Hint: int8", wire=8)
        rates: tuple[Any, ...] = ("a", None, -1.0, float("nan"))
        for wrong in rates:
            with pytest.raises(ValueError, match=rf"lr={wrong!r}.*: it must have a positive rate"):
                OuterStep(lr=wrong)
        refused("the model has 7 parameters that are trained", every=30, fragments=8)
        refused("every=2.5: it must be an integer", every=2.5)
        refused("the optimizer has no parameter of the model", make()[0])
        first = LocalUpdates(model, optimizer)
        twice = "another LocalUpdates exchanges parameters of this model already. Hint: one serves"
        refused(twice, every=2)
        other = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(ValueError, match=twice):
            LocalUpdates(model, other)
        first.close()
        LocalUpdates(model, optimizer).close()
        alone = [dist.new_group([one]) for one in range(world)]
        refused("this rank is not in the group", group=alone[1 - rank])
        refused("averages the gradients of all these ranks", DistributedDataParallel(model))
        match = r"rank 0: Schedule\(every=3, .*; rank 1: Schedule\(every=4, "
        with pytest.raises(CollectiveMismatchError, match=match):
            LocalUpdates(model, optimizer, every=3 + rank)

        frozen = model.requires_grad_(False)
        refused("the model has no parameters that are trained", frozen)


def test_misuse(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_misuse)


def run_sharded_models(rank: int, world: int) -> None:
    match = r"FSDP or ShardedOptimizer has divided this model's parameters.*Hint"
    with process_group():
        sharded = ShardedOptimizer(other := make()[0], torch.optim.SGD, lr=0.1)
        flat = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        for model in (flat, fully_shard(make()[0]), other):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with pytest.raises(ValueError, match=match):
                LocalUpdates(model, optimizer)
        sharded.close()


def test_sharded_models_are_refused(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_sharded_models)


def run_thawed(rank: int, world: int) -> None:
    model, optimizer = make()
    with local_updates(model, optimizer, every=2):
        model.frozen.requires_grad_(True)
        optimizer.step()
        with pytest.raises(ValueError, match=r"frozen, thawed or replaced.*Hint: close\(\)"):
            optimizer.step()


def test_other_parameters_than_at_the_beginning(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_thawed)


def run_load_amid_an_exchange(rank: int, world: int) -> None:
    """One rank loads an earlier state before its thread has begun to exchange."""
    model, optimizer = make()
    with local_updates(model, optimizer, every=4, delay=3) as local:
        state = local.state_dict()
        compare = updates.LocalUpdates._compare

        def late(self: Any, *args: Any) -> None:
            if rank == 0 and threading.current_thread() is not threading.main_thread():
                time.sleep(0.5)
            compare(self, *args)

        with mock.patch.object(updates.LocalUpdates, "_compare", late):
            train(model, optimizer, rank, range(4))
            local.load_state_dict(state)
            assert local.steps == 0


def test_a_state_is_loaded_amid_an_exchange(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_load_amid_an_exchange)


def run_uneven(rank: int, world: int, form: dict[str, Any]) -> None:
    """One rank ends a step before an outer step of the other."""
    model, optimizer = make()
    with local_updates(model, optimizer, **form) as local:
        train(model, optimizer, rank, range(7 + rank))
        with pytest.raises(CollectiveMismatchError, match=UNEVEN):
            local.synchronize()


UNEVEN = r"rank 0: synchronize\(\) after step 7; rank 1: the outer step of step 8\. Hint: take"


def test_ranks_that_take_fewer_steps_are_named(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_uneven, {"every": 8, "delay": 1})


def lose_a_rank(rank: int, world: int, delay: int) -> str | None:
    model, optimizer = make()
    with process_group():
        LocalUpdates(model, optimizer, every=4, delay=delay)
        train(model, optimizer, rank, range(3))
        say("going")
        if rank == 1:
            stay_away(1, world)
        with pytest.raises(PeerLostError) as caught:
            train(model, optimizer, rank, range(3, 3 + 2 * delay + 1))
        return str(caught.value)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_lost_rank_is_named(start_pooled: Start, delay: int) -> None:
    text = without_rank_1(start_pooled, lose_a_rank, delay)
    assert "all_gather" in text and "rank 1" in text


def without_rank_1(start_pooled: Start, case: Any, *args: Any) -> Any:
    """Rank 0's result of a case in which rank 1, when both are going, is killed."""
    with start_pooled(RANKS, case, *args) as ranks:
        for rank in ranks:
            assert rank.heard() == "going"
        ranks[1].kill()
        return ranks[0].result()


def inside_nodes(rank: int, world: int, form: dict[str, Any]) -> list[Tensor]:
    """Gradients are averaged inside nodes of two ranks, parameters between them."""
    model, optimizer = make(seed=rank)
    with process_group():
        inner, _ = dist.new_subgroups(2)
        ddp = DistributedDataParallel(model, process_group=inner)
        local = LocalUpdates(ddp, optimizer, **form)
        train(ddp, optimizer, rank, range(form["every"] - 1))
        mine = [parameter.detach().clone() for parameter in trainable(model)]
        local.synchronize()
        return [*mine, *(parameter.detach() for parameter in trainable(model))]


def test_gradients_inside_a_node(rank_pool: Pool) -> None:
    check_inside_nodes(rank_pool(4).run(inside_nodes, {"every": 5, "outer": "average"}))


def check_inside_nodes(found: list[list[Tensor]]) -> None:
    first, second, third, fourth = found
    half = len(first) // 2
    assert all(map(torch.equal, first[:half], second[:half]))
    assert all(map(torch.equal, third[:half], fourth[:half]))
    assert not torch.equal(first[0], third[0])
    for one in (second, third, fourth):
        assert all(map(torch.equal, first[half:], one[half:]))


def train_a_copy(rank: int, world: int) -> None:
    model, optimizer = make()
    with local_updates(model, optimizer, every=4) as local:
        other = copy.deepcopy(model)
        train(other, torch.optim.SGD(other.parameters(), 0.1), rank, range(3))
        assert local.steps == 0
        train(model, optimizer, rank, range(2))
        assert local.steps == 2


def test_copies_of_a_model_do_not_exchange(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(train_a_copy)
