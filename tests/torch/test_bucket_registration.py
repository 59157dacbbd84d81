"""DDP's buckets move into shared memory; no other tensor moves by itself."""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from sdp_plugins.core import SharedMemoryError
from sdp_plugins.torch import share
from tests.log_lines import logged
from tests.ranks import HANG_S
from tests.torch import models
from tests.torch.jobs import BIG, assert_same, is_shared, process_group, reduce, total, values


def in_backward(act: Callable[[], object]) -> None:
    """Do something where DDP's hooks do it."""
    x = torch.ones((), requires_grad=True)
    x.register_hook(lambda gradient: (act(), gradient)[1])
    (2 * x).backward()


def run_users_tensors(rank: int, world: int) -> None:
    """What a program may do with its own tensors stays legal."""
    with process_group():
        tensor = torch.empty(BIG)
        array = np.from_dlpack(tensor)
        for _ in range(4):
            assert reduce(tensor, rank, world) == "staged"
            in_backward(lambda: reduce(tensor, rank, world))  # in a hook it is the user's as well
            assert_same(torch.from_numpy(array), tensor)  # SIGSEGV once the memory has moved
        tensor.resize_(2 * BIG)
        halves = torch.empty(2 * BIG)
        gradient = torch.empty(2, BIG)
        for _ in range(3):
            reduce(halves, rank, world)
            in_backward(lambda: reduce(gradient, rank, world))
            in_backward(lambda: reduce(halves[: 2 * BIG - 5], rank, world))
            in_backward(lambda: reduce(halves[1:], rank, world))
        assert not is_shared(halves)
        assert not is_shared(gradient)


def test_users_tensors_never_move_by_themselves(rank_pool: Any) -> None:
    rank_pool(2).run(run_users_tensors)


class Tracked:
    """Something that a weak reference may refer to."""


def run_callers_variables(rank: int, world: int) -> None:
    """A look at a frame's f_locals keeps its variables alive before Python 3.13."""
    with process_group():
        tracked = Tracked()
        known = weakref.ref(tracked)
        reduce(torch.empty(BIG), rank, world)
        del tracked
        assert known() is None


def test_variables_of_callers_are_not_kept(rank_pool: Any) -> None:
    rank_pool(2).run(run_callers_variables)


def flat_hook(paths: list[str], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduces the bucket's buffer, and a tensor of the user's."""
    for tensor in (bucket.buffer(), OWN):
        dist.all_reduce(tensor)
        paths.append(str(dist.group.WORLD.last_path))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


OWN = torch.ones(BIG)


def run_buckets(rank: int, world: int) -> None:
    """The second sighting of a bucket registers it; what else a comm hook reduces stays."""
    with process_group():
        paths: list[str] = []
        model = models.wrap(models.Plain, None, bucket_cap_mb=100)
        # A lambda, as DDP refuses the annotations of this module, which are strings.
        model.register_comm_hook(paths, lambda paths, bucket: flat_hook(paths, bucket))
        models.train(model, rank, steps=4)
        # DDP makes new buckets after the first step.
        assert paths[0::2] == ["staged", "staged", "zero-copy", "zero-copy"]
        assert paths[1::2] == ["staged"] * 4
        assert not is_shared(OWN)


def test_the_second_sighting_of_a_bucket_registers(rank_pool: Any) -> None:
    rank_pool(2).run(run_buckets)


def run_hooks(rank: int, world: int) -> None:
    plain = default_hooks.allreduce_hook
    for hook in (plain, lambda state, bucket: plain(state, bucket)):
        with process_group() as group:
            model = models.wrap(models.Plain, None, bucket_cap_mb=100)
            model.register_comm_hook(None, hook)
            models.train(model, rank, steps=4)
            assert group.last_path == "zero-copy", hook


def test_buckets_of_comm_hooks_are_reduced_in_place(rank_pool: Any) -> None:
    rank_pool(2).run(run_hooks)


# DDP refuses annotations that are strings.
def hook_that_deletes(state, bucket):  # type: ignore[no-untyped-def]
    future = default_hooks.allreduce_hook(state, bucket)
    del bucket
    dist.all_reduce(OWN)
    return future


def run_hook_that_deletes(rank: int, world: int) -> None:
    """A parameter that was deleted is no variable of its frame."""
    with process_group():
        model = models.wrap(models.Plain, None, bucket_cap_mb=100)
        model.register_comm_hook(None, hook_that_deletes)
        models.train(model, rank, steps=2)
        assert not is_shared(OWN)


def test_a_comm_hook_may_delete_its_bucket(rank_pool: Any) -> None:
    rank_pool(2).run(run_hook_that_deletes)


def run_exported_gradient(rank: int, world: int) -> None:
    """NumPy refers to a bucket, through a gradient that is a view of it."""
    with process_group() as group:
        options = {"bucket_cap_mb": 100, "gradient_as_bucket_view": True}
        model = models.wrap(models.Plain, None, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(5):
            optimizer.zero_grad(set_to_none=False)
            models.loss_of(model, models.batch(rank, step)).backward()
            gradient = next(model.parameters()).grad
            assert gradient is not None
            if step == 1:  # DDP makes new buckets after the first step
                array = gradient.numpy()
            if step > 1:
                assert_same(torch.from_numpy(array), gradient)
        assert group.last_path == "staged"


def test_a_bucket_that_numpy_refers_to_stays(rank_pool: Any) -> None:
    rank_pool(2).run(run_exported_gradient)


def run_with_switch(rank: int, world: int, switch: str) -> Any:
    with mock.patch.dict(os.environ, {"SDP_REGISTER": switch}), process_group() as group:
        tensor = torch.empty(BIG)
        share(tensor)
        paths = {reduce(tensor, rank, world) for _ in range(3)}
        model = models.wrap(models.Plain, None, gradient_as_bucket_view=True)
        models.train(model, rank)
        return [p.detach() for p in model.parameters()], paths, group.last_path


def test_the_switch_changes_no_result(rank_pool: Any) -> None:
    on, off = (rank_pool(2).run(run_with_switch, switch) for switch in ("1", "0"))
    assert [paths for _, paths, _ in on] == [{"zero-copy"}] * 2
    assert [paths for _, paths, _ in off] == [{"staged"}] * 2
    assert_same([parameters for parameters, *_ in on], [parameters for parameters, *_ in off])


def run_ddp(rank: int, world: int, options: dict[str, Any]) -> None:
    with process_group() as group:
        model = models.wrap(models.Plain, None, bucket_cap_mb=100, **options)
        models.train(model, rank, steps=3)  # DDP makes new buckets after the first step
        models.train(model, rank, steps=1)
        assert group.last_path == "zero-copy"
        gradient = next(model.parameters()).grad
        assert gradient is not None
        assert is_shared(gradient) == options.get("gradient_as_bucket_view", False)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str
)
def test_buckets_of_ddp_are_reduced_in_place(rank_pool: Any, options: dict[str, Any]) -> None:
    rank_pool(2).run(run_ddp, options)


def foreign_memory() -> dict[str, torch.Tensor]:
    """Memory that something else than torch also refers to, so that it must stay where it is."""
    exported = torch.zeros(BIG)
    exported.numpy()
    return {
        "from numpy": torch.from_numpy(np.zeros(BIG, np.float32)),
        "to numpy": exported,
        "from buffer": torch.frombuffer(bytearray(4 * BIG), dtype=torch.float32),
        "from dlpack": torch.from_dlpack(np.zeros(BIG, np.float32)),
        "view of numpy": torch.from_numpy(np.zeros(BIG + 5, np.float32))[5:],
    }


def run_foreign_memory(rank: int, world: int) -> None:
    with process_group():
        for name, tensor in foreign_memory().items():
            pointer = tensor.data_ptr()
            with pytest.raises(ValueError, match=r"cannot move.*Hint"):
                share(tensor)
            paths = set()
            for _ in range(3):
                in_backward(lambda t=tensor, p=paths: p.add(reduce(t, rank, world)))  # type: ignore[misc]
            assert paths == {"staged"}, name
            assert tensor.data_ptr() == pointer, name
            assert not is_shared(tensor), name
        array = np.zeros(BIG, np.float32)
        tensor = torch.from_numpy(array)
        for _ in range(3):
            reduce(tensor, rank, world)
        tensor[0] = 42
        assert array[0] == 42  # still one memory


def test_foreign_memory_stays_where_it_is(rank_pool: Any) -> None:
    rank_pool(2).run(run_foreign_memory)


def run_part_of_a_storage(rank: int, world: int) -> None:
    with process_group():
        whole = torch.zeros(4 * BIG)
        for _ in range(3):
            for part in whole.chunk(4):
                in_backward(lambda p=part: reduce(p, rank, world))  # type: ignore[misc]
        assert not is_shared(whole)


def test_a_part_of_a_storage_does_not_move_it(rank_pool: Any) -> None:
    rank_pool(2).run(run_part_of_a_storage)


def run_in_flight(rank: int, world: int) -> None:
    """A storage does not move under an operation that works on it, in whatever group."""
    with process_group() as group:
        second = dist.new_group()
        tensor = values(rank, BIG)
        dist.all_reduce(tensor)
        dist.barrier()
        if rank == 0:
            pending = dist.broadcast(tensor, 0, group=second, async_op=True)
            expected = tensor.clone()
            work = dist.all_reduce(torch.empty_like(tensor).copy_(tensor), async_op=True)
            assert group._in_flight(tensor.untyped_storage()._cdata)
            for _ in range(2):
                group._registrations.see(tensor, True, group._in_flight)
            with pytest.raises(ValueError, match="in flight"):
                share(tensor)
            assert not is_shared(tensor)
            pending.wait()
            assert not group._in_flight(tensor.untyped_storage()._cdata)
            work.wait()
            assert_same(tensor, expected)
        else:
            work = dist.all_reduce(tensor.clone(), async_op=True)
            received = torch.empty(BIG)
            work.wait()
            dist.broadcast(received, 0, group=second)
            assert_same(received, total(world, BIG))


def test_no_move_under_an_operation_in_flight(rank_pool: Any) -> None:
    rank_pool(2).run(run_in_flight)


def run_no_room(rank: int, world: int) -> list[str]:
    """There is no memory to move to: one line in the log, and everything works."""
    from sdp_plugins.torch import shared_storage

    original = shared_storage.available_bytes
    shared_storage.available_bytes = lambda: 2**20
    try:
        with logged("sdp_plugins.torch.bucket_registration") as lines, process_group():
            for _ in range(2):
                model = models.wrap(models.Plain, None)
                models.train(model, rank)
                assert dist.group.WORLD.last_path == "staged"
            tensor = torch.empty(BIG)
            with pytest.raises(SharedMemoryError, match=r"cannot move.*Hint"):
                share(tensor)
        return lines
    finally:
        shared_storage.available_bytes = original


def test_no_room_is_one_line_in_the_log(rank_pool: Any) -> None:
    for lines in rank_pool(2).run(run_no_room):
        assert len(lines) == 1
        assert "SDP_REGISTER=0" in lines[0]


def touch_gradients(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.sum().item()


def run_forked(rank: int, world: int) -> None:
    """Forked children, such as DataLoader's workers, see the group's memory but leave it alone."""
    with process_group():
        options = {"bucket_cap_mb": 100, "gradient_as_bucket_view": True}
        model = models.wrap(models.Plain, None, **options)
        models.train(model, rank)
        child = multiprocessing.get_context("fork").Process(target=touch_gradients, args=(model,))
        child.start()
        child.join(HANG_S)
        assert child.exitcode == 0
        dataset = torch.utils.data.TensorDataset(*models.batch(rank, 0, 40))
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        for data in loader:
            models.loss_of(model, data).backward()
        assert dist.group.WORLD.last_path == "zero-copy"
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert models.agree(grads)


def test_forked_children(rank_pool: Any) -> None:
    rank_pool(2).run(run_forked)
