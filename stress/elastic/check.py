"""What must hold of an elastic training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from stress.elastic.rank import SEED, Committed, digits, made


def problems(committed: Sequence[Committed], is_whole: bool) -> Iterator[str]:
    """Find what does not hold.

    Args:
        committed: What the ranks have told.
        is_whole: Whether the training has come to its end.
    """
    steps: dict[int, list[Committed]] = defaultdict(list)
    for one in committed:
        steps[one.step].append(one)
    if sorted(steps) != list(range(len(steps))):
        yield f"steps are missing: {len(steps)} of {max(steps) + 1}"
        return
    for number, told in steps.items():
        for name in ("digest", "epoch", "first", "counts"):
            if len({getattr(one, name) for one in told}) > 1:
                yield f"step {number}: ranks differ in {name}: {told}"
                return
    yield from samples(steps, is_whole)
    yield from replayed(steps)


def samples(steps: dict[int, list[Committed]], is_whole: bool) -> Iterator[str]:
    """Each sample is used once in each epoch."""
    used: dict[int, int] = defaultdict(int)
    for number in sorted(steps):
        one = steps[number][0]
        if one.first != used[one.epoch]:
            yield f"step {number} of epoch {one.epoch} begins at {one.first}, not {used[one.epoch]}"
        used[one.epoch] = one.first + sum(one.counts)
    size = len(digits())
    whole = sorted(used) if is_whole else sorted(used)[:-1]
    yield from (f"epoch {e} has used {used[e]} of {size}" for e in whole if used[e] != size)


def replayed(steps: dict[int, list[Committed]]) -> Iterator[str]:
    """One process with the same samples has the same losses."""
    model, optimizer = made()
    x, y = digits().tensors
    epoch, order = -1, torch.empty(0)
    worst = 0.0
    for number in sorted(steps):
        one = steps[number][0]
        if one.epoch != epoch:
            epoch = one.epoch
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED + epoch))
        for told in steps[number]:
            rank = told.numbers.index(told.number)
            at = one.first + sum(one.counts[:rank])
            mine = order[at : at + one.counts[rank]]
            if len(mine):
                with torch.no_grad():
                    expected = functional.cross_entropy(model(x[mine]), y[mine]).item()
                worst = max(worst, abs(told.loss - expected) / max(1e-3, abs(expected)))
        chosen = order[one.first : one.first + sum(one.counts)]
        optimizer.zero_grad()
        functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    if worst > 1e-6:
        yield f"losses differ from those of one process by up to {worst:.2g}"
