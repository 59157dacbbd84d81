"""`Elastic`: training loops whose ranks are lost, and joined by others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import sdp_plugins.torch as sdp
from sdp_plugins.core import RendezvousError
from sdp_plugins.torch.elastic.loader import division
from tests import elastic_trainings
from tests.elastic_trainings import net, optimizers, same
from tests.faults import die
from tests.ranks import Start, say

TIMEOUT_S = 30.0
STOPPED_S = 5.0
SAMPLES, EPOCHS, BATCH, DECAY_STEPS = 203, 3, 8, 20


data = partial(elastic_trainings.data, SAMPLES)


class Job:
    """A job under test: what each rank has done, and how it ends."""

    def __init__(self, rank: int) -> None:
        self.model = net(seed=rank)  # rank 0's count
        self.optimizer, scheduler = optimizers(self.model.parameters(), DECAY_STEPS)
        self.elastic = sdp.Elastic(
            self.model, self.optimizer, timeout_s=TIMEOUT_S, scheduler=scheduler
        )
        self.scheduler = scheduler
        self.taken: list[tuple[int, int, list[int]]] = []  # step, number of ranks and samples
        self.current: list[int] = []

    def train(self, before: Callable[[str, int], None] = lambda where, step: None) -> None:
        elastic = self.elastic
        loader, model = elastic.loader(data(), BATCH, seed=3), elastic.model
        for _ in elastic.epochs(EPOCHS):
            for x, y, index in loader:
                number, size = elastic.progress.steps, elastic.world_size
                self.current = index.tolist()
                with elastic.step() as step:
                    before("forward", number)
                    loss = functional.cross_entropy(model(x), y)
                    before("backward", number)
                    loss.backward()
                    before("optimizer", number)
                    self.optimizer.step()
                    before("end", number)
                    self.optimizer.zero_grad()
                    self.scheduler.step()
                if not step.discarded:
                    self.taken.append((number, size, self.current))

    def result(self) -> dict[str, Any]:
        weights = [parameter.detach().numpy() for parameter in self.model.parameters()]
        kept = self.optimizer.state_dict()["state"][0]["exp_avg"].numpy()
        self.elastic.close()
        return {"weights": [*weights, kept], "taken": self.taken}


def samples_of(results: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The samples of each step, of all ranks."""
    steps: dict[int, list[int]] = {}
    for result in results:
        for number, _, indices in result["taken"]:
            steps.setdefault(number, []).extend(indices)
    return steps


def check(results: list[dict[str, Any]]) -> None:
    elastic_trainings.check(results, samples_of(results), SAMPLES, EPOCHS, DECAY_STEPS)


def train(rank: int, world: int) -> dict[str, Any]:
    job = Job(rank)
    job.train()
    return job.result()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_one_process(start_pooled: Start, world: int) -> None:
    """Each sample once in each epoch, also the last ones, which are divided unevenly."""
    with start_pooled(3, train_some, world) as ranks:
        check(ranks.results()[:world])


def train_some(rank: int, world: int, some: int) -> dict[str, Any] | None:
    if rank >= some:
        return None
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(some))
    return train(rank, some)


@pytest.mark.parametrize(
    ("left", "counts"),
    [(100, [8, 8, 8]), (24, [8, 8, 8]), (23, [8, 8, 7]), (4, [2, 1, 1]), (1, [1, 0, 0])],
)
def test_division(left: int, counts: list[int]) -> None:
    assert division(left, 8, 3) == counts


def one_left_over(rank: int, world: int) -> list[Any]:
    """A rank without a sample in the last step takes part, but does not count."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    elastic = sdp.Elastic(model, optimizer, timeout_s=TIMEOUT_S)
    x = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]], dtype=torch.float64)
    gradients = []
    for (batch,) in elastic.loader(TensorDataset(x), 1, shuffle=False):
        with elastic.step():
            elastic.model(batch).sum().backward()
            optimizer.step()
            assert model.weight.grad is not None
            gradients.append(model.weight.grad.item())
            optimizer.zero_grad()
    elastic.close()
    return gradients


def test_a_rank_without_a_sample_does_not_count(start_pooled: Start) -> None:
    with start_pooled(2, one_left_over) as ranks:
        assert ranks.results() == [[1.5, 6.0, 16.0]] * 2


# ---- ranks that are lost -------------------------------------------------------------------------


def train_and_lose(rank: int, world: int, victim: int, where: str, at: int) -> dict[str, Any]:
    job = Job(rank)

    def before(here: str, step: int) -> None:
        if (rank, here, step) == (victim, where, at):
            say((job.taken, job.current))
            die()

    job.train(before)
    return job.result()


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "end"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_lost(start_pooled: Start, victim: int, where: str) -> None:
    """The run equals one in one process that is fed the same samples in the same division."""
    with start_pooled(3, train_and_lose, victim, where, 11) as ranks:
        taken, current = ranks[victim].heard()
        results = [ranks[rank].result() for rank in range(3) if rank != victim]
    if (11, 3) in {(number, size) for number, size, _ in results[0]["taken"]}:
        taken.append((11, 3, current))  # the others had all that they needed of it
    else:
        assert where in ("forward", "backward")
    check([*results, {"weights": results[0]["weights"], "taken": taken}])


def be_stopped(rank: int, world: int) -> object:
    job = Job(rank)
    job.elastic._group.core.timeout_s = STOPPED_S

    def before(here: str, step: int) -> None:
        if (rank, here, step) == (0, "backward", 7):
            say("stopped")
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        job.train(before)
    except RendezvousError as error:
        return error
    return job.result()


def test_a_stopped_rank_is_left_out(start_pooled: Start) -> None:
    with start_pooled(3, be_stopped) as ranks:
        assert ranks[0].heard() == "stopped"
        same([ranks[rank].result() for rank in (1, 2)])
        ranks[0].kill(signal.SIGCONT)
        assert isinstance(ranks[0].result(), RendezvousError)


# ---- ranks that join -----------------------------------------------------------------------------


def lead_or_join(rank: int, world: int, starting: int, folder: Path) -> dict[str, Any]:
    """Ranks from `starting` on join when rank 0 has come to its fifth step."""
    told, number = folder / "handles", rank
    if rank < starting:
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(starting))
    else:
        while not told.exists():
            time.sleep(0.01)
        os.environ["SDP_JOIN"] = told.read_text()
    try:
        job = Job(rank)
    finally:
        os.environ.pop("SDP_JOIN", None)

    def before(here: str, step: int) -> None:
        if (here, step) == ("forward", 5) and number == 0 and not told.exists():
            participant = job.elastic._group._participant
            (folder / "new").write_text(",".join(map(str, participant.roster.handles)))
            (folder / "new").rename(told)
            while participant.waiting() < world - starting:
                time.sleep(0.001)

    job.train(before)
    return job.result()


@pytest.mark.parametrize("starting", [1, 2])
def test_others_join(start_pooled: Start, starting: int, tmp_path: Path) -> None:
    """They begin where the others are, with their weights, optimizers and schedulers."""
    with start_pooled(3, lead_or_join, starting, tmp_path) as ranks:
        results = ranks.results()
    check(results)
    for newcomer in results[starting:]:
        assert 0 < newcomer["taken"][0][0] <= 8


# ---- mistakes ------------------------------------------------------------------------------------


UNEVEN_BATCH = 4  # of all ranks; there are 7 samples


def uneven_step(
    model: nn.Module, forward: Callable[[torch.Tensor], Any], optimizer: Any, x: Any, y: Any
) -> None:
    """A step whose closure clips the gradients."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(forward(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss

    optimizer.step(closure)


def uneven_job(seed: int) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    x, y = torch.randn(7, 3), torch.randn(7, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), x, y


def train_uneven(rank: int, world: int) -> list[Any]:
    model, optimizer, x, y = uneven_job(0)
    elastic = sdp.Elastic(model, optimizer, timeout_s=TIMEOUT_S)
    loader = elastic.loader(TensorDataset(x, y), UNEVEN_BATCH // world, shuffle=False)
    for _ in elastic.epochs(2):
        for batch in loader:
            with elastic.step():
                uneven_step(model, elastic.model, optimizer, *batch)
    elastic.close()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def test_clipping_and_closures_see_the_mean_over_uneven_batches(start_pooled: Start) -> None:
    model, optimizer, x, y = uneven_job(0)
    for _ in range(2):
        for batch in zip(x.split(UNEVEN_BATCH), y.split(UNEVEN_BATCH), strict=True):
            uneven_step(model, model, optimizer, *batch)
    expected = [parameter.detach().numpy() for parameter in model.parameters()]
    with start_pooled(2, train_uneven) as ranks:
        first, second = ranks.results()
    for mine, others, alone in zip(first, second, expected, strict=True):
        np.testing.assert_array_equal(mine, others)
        np.testing.assert_allclose(mine, alone, rtol=1e-5, atol=1e-7)


def leave_an_epoch(job: Job, leaves: bool) -> None:
    elastic = job.elastic
    loader = elastic.loader(data(), BATCH)
    for epoch in elastic.epochs(2):
        for number, (x, y, _) in enumerate(loader):
            with elastic.step():
                functional.cross_entropy(elastic.model(x), y).backward()
                job.optimizer.step()
            if leaves and (epoch, number) == (0, 1):
                break


def break_alone(rank: int, world: int) -> None:
    job = Job(rank)
    with pytest.raises(RuntimeError, match=r"different places.*Hint: leave loops"):
        leave_an_epoch(job, rank == 0)
    job.elastic.close()


def test_ranks_in_different_epochs_are_told(start_pooled: Start) -> None:
    with start_pooled(2, break_alone) as ranks:
        ranks.results()


def take(job: Job, model: nn.Module, steps: bool) -> None:
    x, y, _ = data()[:BATCH]
    with job.elastic.step():
        functional.cross_entropy(model(x), y).backward()
        if steps:
            job.optimizer.step()
            job.optimizer.zero_grad()


def misuse(rank: int, world: int) -> list[str]:
    torch.distributed.init_process_group("smddp")
    with pytest.raises(RuntimeError) as early:
        Job(rank)
    torch.distributed.destroy_process_group()
    told, job = [str(early.value)], Job(rank)
    with pytest.raises(TypeError) as wrapped:
        sdp.Elastic(nn.parallel.DistributedDataParallel(job.model), job.optimizer)
    told.append(str(wrapped.value))
    for model, steps in ((job.model, True), (job.elastic.model, False)):
        with pytest.raises(RuntimeError) as misused:
            take(job, model, steps)
        told.append(str(misused.value))
    job.elastic.close()
    return told


def test_mistakes_are_told(start_pooled: Start) -> None:
    with start_pooled(2, misuse) as ranks:
        results = ranks.results()
    for told in results:
        for text, wanted in zip(
            told,
            (
                "Hint: remove init_process_group()",
                "Hint: pass the model",
                "Hint: call elastic.model",
                "Hint: take one step in each block",
            ),
            strict=True,
        ):
            assert wanted in text


def accumulate(rank: int, world: int) -> list[Any]:
    """In parts, of which the last one averages; a step that GradScaler skips is none."""
    job, whole = Job(rank), net(seed=0)
    elastic, (x, y, _) = job.elastic, data()[: 2 * BATCH]
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    with elastic.step():
        for part in (0, 1):
            some = slice(part * BATCH // 2, (part + 1) * BATCH // 2)
            context = elastic.model.no_sync() if part == 0 else nullcontext()
            with context:
                loss = functional.cross_entropy(elastic.model(x[mine][some]), y[mine][some])
                (loss / 2).backward()
        gradients = [parameter.grad.clone() for parameter in job.model.parameters()]
        job.optimizer.step()
        job.optimizer.zero_grad()
    functional.cross_entropy(whole(x), y).backward()
    with elastic.step():
        (functional.cross_entropy(elastic.model(x), y) * torch.inf).backward()
    elastic.close()
    return [gradients, [parameter.grad for parameter in whole.parameters()]]


def test_gradients_accumulate_in_a_block(start_pooled: Start) -> None:
    with start_pooled(2, accumulate) as ranks:
        for found, expected in ranks.results():
            torch.testing.assert_close(found, expected)


def forget_step(rank: int, world: int) -> None:
    job = Job(rank)
    try:
        for x, _, _ in job.elastic.loader(data(), BATCH):
            job.elastic.model(x)
    finally:
        job.elastic.close()


def test_a_loop_without_steps_is_told(start_pooled: Start) -> None:
    told = pytest.raises(RuntimeError, match="with elastic")
    with start_pooled(1, forget_step) as ranks, told:
        ranks[0].result()
