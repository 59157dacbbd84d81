"""Memory of the simulated device, and memory of the host that is registered with it."""

from __future__ import annotations

import threading

import pytest
import torch

from tests import simdev
from tests.simdev.cases import OnDevice

on_device = OnDevice(__name__)


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


@on_device
def freed_memory_is_overwritten_unless_recorded() -> None:
    side = torch.Stream(device="simdev")
    for recorded in (False, True):
        values, gate = torch.ones(4, device="simdev"), simdev.gate()
        address = values.data_ptr()
        torch.accelerator.synchronize()
        gate.block(side)
        with side:
            seen = values * 1
        if recorded:
            values.record_stream(side)
        del values
        again = torch.full((4,), 5.0, device="simdev")
        assert (again.data_ptr() == address) is not recorded
        torch.accelerator.current_stream().synchronize()
        gate.open()
        with side:
            assert seen.tolist() == [1.0 if recorded else 5.0] * 4
        del seen, again
        torch.simdev.empty_cache()


@on_device
def memory_can_be_overwritten_when_it_is_reused() -> None:
    simdev.set_poison_late(True)
    side = torch.Stream(device="simdev")
    for reused in (False, True):
        values, gate = torch.ones(4, device="simdev"), simdev.gate()
        torch.accelerator.synchronize()
        gate.block(side)
        with side:
            seen = values * 1
        del values
        again = torch.empty(4, device="simdev") if reused else None
        current().synchronize()
        gate.open()
        with side:
            assert (seen.min().item() > 1e38) is reused
        del seen, again
        torch.simdev.empty_cache()
    simdev.set_poison_late(False)


@on_device
def new_and_freed_memory_is_poisoned() -> None:
    assert torch.empty(100, device="simdev").min() > 1e38
    side = torch.Stream(device="simdev")
    values = torch.ones(4, device="simdev")
    torch.accelerator.synchronize()
    view = torch.empty(0, device="simdev").set_(values.untyped_storage())
    del values
    assert view.sum().item() == 4  # it owns the storage
    gate = simdev.gate()
    gate.block(side)
    with side:
        late = view * 1
    del view  # too early
    current().synchronize()
    gate.open()
    with side:
        assert late.min().item() > 1e38


@on_device
def memory_is_counted_and_given_back() -> None:
    before = simdev.memory_allocated()
    values = torch.ones(1 << 20, device="simdev")
    assert simdev.memory_allocated() - before == 4 << 20
    assert torch.accelerator.memory_allocated() == simdev.memory_allocated()
    del values
    assert simdev.memory_allocated() == before
    assert simdev.max_memory_allocated() >= before + (4 << 20)
    assert torch.simdev.memory_reserved() >= 4 << 20
    torch.accelerator.empty_cache()
    assert torch.simdev.memory_reserved() < 4 << 20


@on_device
def copies_of_pageable_memory_are_synchronous() -> None:
    device = torch.ones(4, device="simdev")
    pageable, pinned = torch.zeros(4), torch.zeros(4).pin_memory()
    assert pinned.is_pinned()
    assert not pageable.is_pinned()
    torch.accelerator.synchronize()
    for copy in (
        lambda: pageable.copy_(device, non_blocking=True),
        lambda: device.copy_(pageable, non_blocking=True),
        lambda: pinned.copy_(device),
        lambda: device.copy_(pinned),
    ):
        gate, returned = simdev.gate(), threading.Event()
        gate.block()
        thread = threading.Thread(target=lambda copy=copy, done=returned: (copy(), done.set()))
        thread.start()
        assert not returned.wait(0.1)
        gate.open()
        thread.join()
    gate = simdev.gate()
    gate.block()
    pinned.copy_(device, non_blocking=True)  # each would wait until the deadline
    device.copy_(pinned, non_blocking=True)
    gate.open()


@on_device
def pinned_memory_is_not_reused_while_a_copy_needs_it() -> None:
    gate, target = simdev.gate(), torch.zeros(4, device="simdev")
    torch.accelerator.synchronize()
    gate.block()
    source = torch.ones(4).pin_memory()
    address = source.data_ptr()
    target.copy_(source, non_blocking=True)
    del source
    other = torch.full((4,), 9.0).pin_memory()
    assert other.data_ptr() != address
    gate.open()
    assert target.sum().item() == 4
    assert torch.empty(4, pin_memory=True).data_ptr() == address


@on_device
def registrations_are_checked() -> None:
    memory = torch.zeros(1000)
    address = memory.data_ptr()
    torch.ones(1, device="simdev")  # before, torch says that nothing is pinned
    assert simdev.host_register(0, 10) == simdev.host_register(address, 0) == 1
    assert simdev.host_register(address, 4000) == 0
    assert simdev.registered() == {address: 4000}
    assert memory.is_pinned()
    assert memory[10:20].is_pinned()
    assert simdev.host_register(address + 100, 10) == 712
    assert simdev.host_unregister(address + 100) == 713
    assert simdev.host_unregister(address) == 0
    assert simdev.host_unregister(address) == 713
    simdev.set_pin_limit(3999)
    assert simdev.host_register(address, 4000) == 2
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.empty(4000, pin_memory=True)
    assert not memory.is_pinned()


@on_device
def memory_unregistered_too_early_is_found() -> None:
    memory, values = torch.zeros(1000), torch.ones(1000, device="simdev")
    for copy in (
        lambda: memory.copy_(values, non_blocking=True),
        lambda: values.copy_(memory, non_blocking=True),
        lambda: simdev.stream_write_value32(0, memory.data_ptr(), 1),
    ):
        gate = simdev.gate()
        assert simdev.host_register(memory.data_ptr(), 4000) == 0
        gate.block()
        copy()
        assert simdev.host_unregister(memory.data_ptr()) == 0
        gate.open()
        with pytest.raises(RuntimeError, match=r"^simdev: access to unregistered host memory"):
            torch.accelerator.synchronize()
        simdev.reset()
    assert memory.sum() == 0


test_case = on_device.test()
