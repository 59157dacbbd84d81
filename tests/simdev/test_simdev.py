"""The simulated device is asynchronous, and shows what is missing to those who forget to wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests import simdev
from tests.simdev.cases import OnDevice

on_device = OnDevice(__name__)
ROOT = Path(__file__).parents[2]


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


@on_device
def kernels_and_copies_run_later() -> None:
    ones = torch.ones(1000, device="simdev")
    host = torch.zeros(1000, pin_memory=True)
    torch.accelerator.synchronize()
    gate, event = simdev.gate(), torch.Event(device="simdev")
    gate.block()
    host.copy_(ones + 1, non_blocking=True)
    event.record()
    assert not event.query()
    assert not current().query()
    assert host.sum() == 0
    gate.open()
    event.synchronize()
    assert host.sum() == 2000
    assert event.query()


@on_device
def streams_run_side_by_side() -> None:
    gate, side = simdev.gate(), torch.Stream(device="simdev")
    gate.block()
    with side:
        assert current() == side
        assert torch.ones(3, device="simdev").sum().item() == 3  # the default stream still waits
    assert not current().query()
    gate.open()


@on_device
def a_missing_wait_shows_stale_numbers() -> None:
    for wait in (False, True):
        side, gate = torch.Stream(device="simdev"), simdev.gate()
        values = torch.zeros(4, device="simdev")
        torch.accelerator.synchronize()
        gate.block()
        values += 1
        if wait:
            side.wait_stream(current())
            threading.Timer(0.01, gate.open).start()
        with side:
            assert values.sum().item() == (4 if wait else 0)
        gate.open()
        torch.accelerator.synchronize()


@on_device
def an_event_is_waited_for_as_it_was_recorded() -> None:
    first, second, event = simdev.gate(), simdev.gate(), torch.Event(device="simdev")
    side = torch.Stream(device="simdev")
    first.block()
    event.record()
    side.wait_event(event)
    second.block()
    event.record()
    first.open()
    side.synchronize()  # waits for the first record only
    assert not event.query()
    second.open()
    event.synchronize()


@on_device
def copies_share_the_link() -> None:
    values = torch.ones(1 << 18, device="simdev")
    hosts = [torch.empty(1 << 18, pin_memory=True) for _ in range(3)]
    torch.accelerator.synchronize()
    begin, end = (torch.Event(device="simdev", enable_timing=True) for _ in range(2))
    simdev.set_link(20 * 2**20)
    begin.record()
    side = torch.Stream(device="simdev")
    side.wait_stream(current())
    hosts[0].copy_(values, non_blocking=True)
    with side:
        hosts[1].copy_(values, non_blocking=True)
        end.record()
    current().wait_stream(side)
    end2 = torch.Event(device="simdev", enable_timing=True)
    end2.record()
    end2.synchronize()
    assert begin.elapsed_time(end2) >= 100  # two of 50 ms, one after the other
    simdev.set_link(1.0)  # takes years
    hosts[0].copy_(values, non_blocking=True)
    simdev.set_link(0.0)
    with side:
        values.copy_(hosts[2], non_blocking=True)  # the other direction
    side.synchronize()
    assert not current().query()
    simdev.reset()


@on_device
def flags_order_streams_and_the_host() -> None:
    flags = torch.zeros(2, dtype=torch.int32)
    done, ready = flags.data_ptr(), flags.data_ptr() + 4
    side = torch.Stream(device="simdev")
    assert simdev.stream_wait_value32(side.stream_id, done, 1) == 1  # not registered
    assert simdev.host_register(done, 8) == 0
    assert simdev.stream_wait_value32(12345, done, 1) == 400
    assert simdev.stream_wait_value32(side.stream_id, done + 1, 1) == 1
    assert simdev.stream_wait_value32(side.stream_id, done, 2**32 - 1) == 0  # 0 is later than -1
    assert simdev.stream_wait_value32(side.stream_id, done, 3) == 0
    assert (
        simdev.stream_write_value32(getattr(side, "native_handle", side.stream_id), ready, 7) == 0
    )
    flags[0] = 2
    assert not side.query()
    assert flags[1] == 0
    flags[0] = 4
    side.synchronize()
    assert flags[1] == 7
    assert simdev.stream_write_value32(0, ready, 8) == 0
    current().synchronize()
    assert flags[1] == 8


@on_device
def a_failure_stays() -> None:
    values = torch.ones(3, device="simdev")
    simdev.fail_next("an illegal access")
    values += 1
    pinned = torch.empty(3, pin_memory=True)
    for use in (
        torch.accelerator.synchronize,
        lambda: values + 1,
        lambda: pinned.copy_(values, non_blocking=True),
        lambda: torch.Event(device="simdev").record(),
        current().synchronize,
    ):
        with pytest.raises(RuntimeError, match=r"^an illegal access"):
            use()
    assert torch.ones(2, device="simdev:1").sum() == 2
    simdev.reset()
    assert torch.ones(2, device="simdev").sum() == 2


@on_device
def a_future_orders_streams_and_keeps_memory() -> None:
    device, side = torch.device("simdev", 0), torch.Stream(device="simdev")
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[device])
    chained = future.then(lambda done: done.value() + 1)
    gate = simdev.gate()
    with side:
        gate.block()
        future.set_result(torch.zeros(4, device="simdev") + 3)
    value = future.wait()  # returns at once, but this stream waits
    doubled = value * 2
    assert not current().query()
    gate.open()
    assert doubled.sum().item() == 24
    assert chained.wait().sum().item() == 16


@on_device
def a_future_without_devices_orders_nothing() -> None:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    side, gate = torch.Stream(device="simdev"), simdev.gate()
    result = torch.zeros(4, device="simdev")
    torch.accelerator.synchronize()
    with side:
        gate.block()
        result += 3
        future.set_result([result])
    assert future.wait()[0].sum().item() == 0  # stale
    gate.open()


@on_device
def synchronizing_lets_other_threads_run() -> None:
    event = torch.Event(device="simdev")
    for wait in (
        torch.accelerator.synchronize,
        event.synchronize,
        lambda: current().synchronize(),
        lambda: torch.ones(2, device="simdev").cpu(),
        lambda: torch.ones(2, device="simdev").nonzero(),
        torch.simdev.empty_cache,
    ):
        gate = simdev.gate()
        gate.block()
        event.record()
        opener = threading.Timer(0.01, gate.open)
        opener.start()
        wait()
        opener.join()


@on_device
def a_wait_has_a_deadline() -> None:
    gate = simdev.gate()
    gate.block()
    simdev.set_deadline(0.05)
    with pytest.raises(RuntimeError, match="stream 0: waits at a gate"):
        torch.accelerator.synchronize()


@on_device
def streams_capture_if_told() -> None:
    assert not simdev.is_current_stream_capturing()
    simdev.set_capturing(True)
    assert torch.simdev.is_current_stream_capturing()
    with torch.Stream(device="simdev"):
        assert not simdev.is_current_stream_capturing()
    simdev.set_capturing(False)


@on_device
def a_forked_child_has_a_device_of_its_own() -> None:
    simdev.gate().block()  # a thread of the parent's waits for ever
    values = torch.ones(3, device="simdev")
    child = os.fork()
    if child == 0:
        with pytest.raises(RuntimeError, match="not device memory of this process"):
            values + 1
        del values
        os._exit(0 if torch.ones(4, device="simdev").sum().item() == 4 else 1)
    assert os.waitpid(child, 0)[1] == 0
    simdev.reset()


def run(source: str) -> subprocess.CompletedProcess[str]:
    """Run a script that has the device, in an interpreter of its own."""
    start = "import torch\nfrom tests import simdev\nsimdev.load()\n"
    command = [sys.executable, "-c", start + source]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_the_host_cannot_touch_device_memory() -> None:
    done = run(
        "import ctypes\nx = torch.ones(4, device='simdev')\nctypes.string_at(x.data_ptr(), 4)"
    )
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("way", ["exit", "fork"])
def test_a_process_ends_with_work_that_waits(way: str) -> None:
    fork = "import os, sys\nif os.fork():\n    sys.exit(os.wait()[1])\n" if way == "fork" else ""
    done = run(f"{fork}simdev.gate().block()\nx = torch.ones(4, device='simdev') + 1")
    assert done.returncode == 0, done.stderr


test_case = on_device.test()
