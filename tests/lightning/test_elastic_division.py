"""How `smddp_elastic` divides an epoch; nothing here starts a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from sdp_plugins.lightning.elastic.division import Division


def loader(samples: int, batch: int, drop_last: bool, rank: int, world: int) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(samples))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, shuffle=True, seed=3)
    return DataLoader(data, batch, sampler=sampler, drop_last=drop_last)


def take(
    ranks: list[tuple[Division, DataLoader[Any]]], steps: int, batch: int
) -> tuple[list[list[int]], list[float]]:
    """Take steps on all ranks: the samples of each step that count, and the sums of weights."""
    taken, sums = [], []
    iterators = [iter(loader) for _, loader in ranks]
    for _ in range(steps):
        step: list[int] = []
        weights = []
        for (division, _), iterator in zip(ranks, iterators, strict=True):
            (samples,) = next(iterator)
            weights.append(division.begin_batch())
            step += samples.tolist() if weights[-1] else []
            division.commit()
        taken.append(step)
        sums.append(sum(weights) / len(ranks))
    return taken, sums


@settings(deadline=None)
@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 5),
    worlds=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    steps=st.integers(0, 4),
    drop_last=st.booleans(),
)
def test_each_sample_is_used_once(
    samples: int, batch: int, worlds: list[int], steps: int, drop_last: bool
) -> None:
    """However the ranks change; loaders have as many batches as they say."""
    state: dict[str, Any] | None = None
    used: list[int] = []
    done = 0
    for number, world in enumerate(worlds):
        ranks = []
        for rank in range(world):
            division = Division(rank, world)
            mine = loader(samples, batch, drop_last, rank, world)
            division.divide(mine)
            if state is not None:
                division.load_state_dict(state)
            ranks.append((division, mine))
        (left,) = {len(mine) - done for _, mine in ranks}
        assert {len(list(mine)) for _, mine in ranks} == {left}
        count = left if number == len(worlds) - 1 else min(steps, left)
        taken, sums = take(ranks, count, batch)
        assert sums == pytest.approx([1.0] * count)
        used += [sample for step in taken for sample in step]
        done += count
        (state,) = {str(d.state_dict()): d.state_dict() for d, _ in ranks}.values()
    assert len(used) == len({*used})
    assert samples - len(used) < (batch * worlds[-1] if drop_last else 1)


def test_a_discarded_step_is_taken_again() -> None:
    division, mine = Division(0, 1), loader(10, 2, False, 0, 1)
    division.divide(mine)
    first = next(iter(mine))[0].tolist()
    division.begin_batch()
    states = [division.in_step]
    division.discard()
    states.append(division.in_step)
    assert states == [True, False]
    assert next(iter(mine))[0].tolist() == first


def test_an_epoch_has_its_order() -> None:
    division, mine = Division(0, 1), loader(30, 2, False, 0, 1)
    division.divide(mine)
    orders = []
    for epoch in range(2):
        division.begin_epoch(epoch)
        orders.append([int(sample) for (batch,) in mine for sample in batch])
    expected = torch.randperm(30, generator=torch.Generator().manual_seed(3)).tolist()
    assert orders[0] == expected and sorted(orders[1]) == sorted(expected) != orders[1]


def test_what_cannot_be_divided() -> None:
    data = TensorDataset(torch.arange(4))
    weighted = WeightedRandomSampler([1.0] * 4, 4)
    others: list[Any] = [DataLoader(data, 2, sampler=weighted), DataLoader(data, None), [1, 2]]
    for refused in others:
        with pytest.raises(TypeError, match="use_distributed_sampler=True"):
            Division(0, 1).divide(refused)
