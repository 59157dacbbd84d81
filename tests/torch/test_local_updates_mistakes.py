"""What users do wrong with local updates, and what an outer step that fails leaves behind."""

from __future__ import annotations

import gc
import os
import re
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from sdp_plugins.core import CollectiveMismatchError, PeerLostError, SdpError
from sdp_plugins.core.local_updates import updates
from sdp_plugins.core.local_updates.outer_step import AVERAGE
from sdp_plugins.core.local_updates.schedule import Schedule
from sdp_plugins.torch import LocalUpdates, OuterStep
from tests.faults import stay_away
from tests.ranks import Pool, Start, say
from tests.torch.jobs import process_group
from tests.torch.test_local_updates import RANKS, local_updates, make, train, without_rank_1

# ---- models --------------------------------------------------------------------------------------


def named(*names: str, **form: Any) -> nn.Module:
    model = nn.Module()
    for name in names:
        model.register_parameter(name, nn.Parameter(torch.zeros(4, **form)))
    return model


def run_different_models(rank: int, world: int) -> None:
    with process_group():

        def refused(first: str, second: str, model: nn.Module) -> None:
            said = re.escape(f"local updates: ranks disagree: rank 0: {first}; rank 1: {second}. H")
            with pytest.raises(CollectiveMismatchError, match=said):
                LocalUpdates(model, torch.optim.SGD(model.parameters(), 0.1))

        first, second = "weight: (6, 4), torch.float32", "weight: (4, 6), torch.float32"
        layers = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)
        refused(first, second, layers[rank])
        first, second = "a: (4,), torch.float32", "b: (4,), torch.float32"
        refused(first, second, named("ab"[rank], "ab"[1 - rank]))
        second = "a: (4,), torch.bfloat16"
        dtype = torch.bfloat16 if rank else torch.float32
        refused(first, second, named("a", dtype=dtype))
        refused("nothing", "b: (4,), torch.float32", named("a", *"b"[:rank]))


def test_models_that_differ(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_different_models)


def run_shared_memory(rank: int, world: int) -> None:
    whole = torch.zeros(10)
    with process_group():
        for other, is_refused in (
            (whole[:5], True),
            (whole[4:8], True),
            (whole.view(5, 2)[:, 1], True),
            (whole[5:], False),
            (whole[:0], False),
        ):
            model = nn.Module()
            model.first, model.second = nn.Parameter(whole[:5]), nn.Parameter(other)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            if is_refused:
                with pytest.raises(ValueError, match="two parameters of the model share memory"):
                    LocalUpdates(model, optimizer)
            else:
                LocalUpdates(model, optimizer).close()


def test_parameters_that_share_memory(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_shared_memory)


def run_small_steps(rank: int, world: int, delay: int) -> float:
    """One of two ranks comes forward by an ulp in each round: the average by half of one."""
    model = named("a", dtype=torch.bfloat16)
    nn.init.ones_(model.a)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with local_updates(model, optimizer, every=4, delay=delay) as local:
        for step in range(80):
            model.a.grad = torch.zeros_like(model.a)
            if rank == 0 and step % 4 == 2:
                model.a.grad -= 2**-7
            optimizer.step()
        local.synchronize()
        return float(model.a[0])


def test_small_steps_of_16_bit_parameters_add_up(rank_pool: Pool) -> None:
    for delay in (0, 1, 2):
        found = rank_pool(RANKS).run(run_small_steps, delay)
        assert found[0] == found[1] and abs(found[0] - (1 + 20 * 2**-8)) <= 2**-7, (delay, found)


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", [(float("nan"), 0), (-1, 0), (0, 0), (float("inf"), 0), (1, 1), (1, -0.1)]
)
def test_outer_steps_that_cannot_learn(form: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"OuterStep\(.*positive rate"):
        OuterStep(*form)


def test_equal_settings_have_equal_texts() -> None:
    assert str(OuterStep(1, 0)) == str(AVERAGE)
    assert str(Schedule(np.int64(4))) == str(Schedule(4))  # type: ignore[arg-type]


def run_settings_of_a_subgroup(rank: int, world: int) -> None:
    with process_group():
        group = dist.new_group([1, 2])
        if rank != 0:
            match = r"local updates: .* rank 1: Schedule\(every=1, .*; rank 2: Schedule\(every=2, "
            with pytest.raises(CollectiveMismatchError, match=match):
                LocalUpdates(*make(), every=rank, group=group)
        dist.barrier()


def test_ranks_have_their_numbers_in_the_job(rank_pool: Pool) -> None:
    rank_pool(3).run(run_settings_of_a_subgroup)


# ---- failures ------------------------------------------------------------------------------------


def run_construct_in_vain(rank: int, world: int) -> None:
    model, optimizer = make()
    model.register_buffer("sparse", torch.zeros(3).to_sparse())
    with process_group():
        counts = []
        for _ in range(3):
            with pytest.raises(RuntimeError):
                LocalUpdates(model, optimizer)
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
            dist.barrier()
        assert counts[0] == counts[-1], counts


def test_nothing_is_left_of_one_that_cannot_be_made(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_construct_in_vain)


def run_without_threads(rank: int, world: int) -> None:
    model, optimizer = make()
    with local_updates(model, optimizer, every=2, delay=1) as local:
        train(model, optimizer, rank, range(1))
        with (
            mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no thread")),
            pytest.raises(RuntimeError, match="no thread"),
        ):
            train(model, optimizer, rank, range(1, 2))
        assert local.state_dict()["exchange"] is None
        train(model, optimizer, rank, range(2, 4))
        assert local.state_dict()["exchange"] is not None


def test_an_exchange_that_cannot_begin_is_not_awaited(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_without_threads)


def fail_in_an_outer_step(rank: int, world: int, delay: int) -> tuple[str, bool]:
    """The state after the failure is that after the last outer step that all have taken."""
    model, optimizer = make()
    with process_group():
        local = LocalUpdates(model, optimizer, every=4, delay=delay, outer="nesterov")
        train(model, optimizer, rank, range(4 + delay))
        before = local.state_dict()
        say("going")
        if rank == 1:
            stay_away(1, world)
        with pytest.raises(PeerLostError) as caught:
            train(model, optimizer, rank, range(4 + delay, 8 + delay))
        state = local.state_dict()
        assert state["exchange"] is None
        kept = [
            torch.equal(mine, theirs)
            for name in ("anchors", "momenta")
            for mine, theirs in zip(state[name], before[name], strict=True)
        ]
        text = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        return text, all(kept)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_state_can_be_saved_after_a_failure(start_pooled: Start, delay: int) -> None:
    text, is_kept = without_rank_1(start_pooled, fail_in_an_outer_step, delay)
    assert is_kept and "rank 1" in text and " local updates (ranks 0, 1)]" in text
    if hasattr(PeerLostError, "add_note"):
        assert "part of the outer step of step 8 of local updates. Hint: take the same" in text


def run_interrupted(rank: int, world: int) -> None:
    model, optimizer = make()
    with local_updates(model, optimizer, every=2) as local:
        train(model, optimizer, rank, range(1))
        with (
            mock.patch.object(updates.Fragment, "exchange", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            train(model, optimizer, rank, range(1, 2))
        local.load_state_dict(local.state_dict())
        train(model, optimizer, rank, range(2, 6))
        local.synchronize()


def test_an_interrupt_is_raised_once(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_interrupted)


def run_one_file(rank: int, world: int, folder: str) -> None:
    """All ranks load the state that rank 0 has saved."""
    model, optimizer = make()
    with local_updates(model, optimizer) as local:
        if rank == 0:
            torch.save(local.state_dict(), f"{folder}/state.pt")
        dist.barrier()
        begun = r"load_state_dict\(\) of step 0, .*", r"load_state_dict\(\) of .* rank is 0, not 1"
        match = f"rank 0: {begun[0]}; rank 1: {begun[1]}. Hint: save"
        with pytest.raises(CollectiveMismatchError, match=match):
            local.load_state_dict(torch.load(f"{folder}/state.pt"))


def test_one_file_for_all_ranks(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(RANKS).run(run_one_file, str(tmp_path))


def run_group_gone(rank: int, world: int) -> None:
    model, optimizer = make()
    with process_group():
        LocalUpdates(model, optimizer, every=1)
    with pytest.raises(SdpError, match="is closed") as caught:
        train(model, optimizer, rank, range(1))
    if hasattr(SdpError, "add_note"):
        assert "Hint: close the local updates before" in caught.value.__notes__[0]


def test_the_group_was_destroyed_before(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_group_gone)


def run_closed(rank: int, world: int) -> None:
    with local_updates(*make()) as local:
        local.close()
        with pytest.raises(RuntimeError, match=r"synchronize\(\) after close\(\).*Hint"):
            local.synchronize()


def test_closed(rank_pool: Pool) -> None:
    rank_pool(RANKS).run(run_closed)
