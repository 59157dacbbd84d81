"""Mutants of the accelerator's code: a line that orders streams or keeps memory is taken away.

Left out, because the simulated device cannot show them:

- The order in which calls are enqueued, which matters where a device serves two streams by one
  queue.
- `record_stream(device.down)`: a thread holds the tensors until they are down. Only after a failure
  may it drop them earlier; nobody uses what those copies then read.
- The order of copies and flags in C++: `tests/cpp/test_device_streams.cpp` shows that.
- Locks, which matter only where threads meet at the wrong moment.
- `inner.wait()` of a message that is done: it only raises the message's error.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple

PACKAGE = "sdp_plugins.torch.accelerator."
MODULES = (  # each after those that it imports
    "sdp_plugins.torch.futures",
    *(PACKAGE + name for name in ("device_thread", "call_order", "pinned_ring", "pieces")),
    *(PACKAGE + name for name in ("host_copies", "works", "flagged", "threaded", "device_calls")),
)
BOTH = ("flagged", "threaded")


class Mutant(NamedTuple):
    """A change of our code, and the probe that fails then.

    Attributes:
        module: The last part of the module's name.
        source: Text that occurs once in it.
        change: What is there instead.
        probe: The probe's name.
        tiers: Where it fails.
    """

    module: str
    source: str
    change: str
    probe: str
    tiers: tuple[str, ...] = BOTH


def load(mutant: Mutant | None) -> None:
    """Run the modules' sources again, one of them changed.

    Modules that were imported stay the same objects, so that what imports them later, as process
    groups do with `device_calls`, gets the mutant.
    """
    for name in MODULES:
        module = importlib.import_module(name)
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        if mutant is not None and name.rpartition(".")[2] == mutant.module:
            assert source.count(mutant.source) == 1, f"{mutant.source!r} is not there once"
            source = source.replace(mutant.source, mutant.change)
        exec(compile(source, module.__file__, "exec"), vars(module))


F, T = ("flagged",), ("threaded",)
AWAIT = 'await_device(event, group, "all_reduce", call.timeout_s)'
MUTANTS = [
    # ---- flagged ----
    Mutant(
        "flagged",
        "self._down.wait_stream(torch.accelerator.current_stream(self._down.device))",
        "pass",
        "reads_current_stream",
        F,
    ),
    Mutant("flagged", "self._down.wait_event(event)", "pass", "slots_are_reused_safely", F),
    Mutant("flagged", "slot.is_free = is_free", "pass", "slots_are_reused_safely", F),
    Mutant("flagged", "is_free.record(self._up)", "pass", "slots_are_reused_safely", F),
    Mutant("flagged", "tensor.record_stream(self._up)", "pass", "dropped_tensors_are_kept", F),
    Mutant("flagged", "(*call.tensors, *call.dense)", "call.tensors", "temporaries_are_kept", F),
    Mutant("flagged", "event.record(self._up)", "pass", "wait_orders_streams", F),
    Mutant(
        "flagged",
        "self._driver.check(self._copies.copy_up(staged))",
        "pass",
        "works_over_a_slow_link",
        F,
    ),
    Mutant(
        "flagged",
        "with on(self._up):\n                call.copy_back()",
        "if True:\n                call.copy_back()",
        "wait_orders_streams",
        F,
    ),
    Mutant(
        "flagged",
        "islice(pieces, SLOTS)",
        "islice(pieces, 2 * SLOTS)",
        "slots_are_reused_safely",
        F,
    ),
    # ---- threaded ----
    Mutant("threaded", "down.wait_event(self._start)", "pass", "reads_current_stream", T),
    Mutant("threaded", "down.wait_event(slot.is_free)", "pass", "slots_are_reused_safely", T),
    Mutant(
        "threaded", "slot.is_free = self._up.record_event()", "pass", "slots_are_reused_safely", T
    ),
    Mutant("threaded", "with on(down):", "if True:", "works_over_a_slow_link", T),
    Mutant("threaded", "event.record(down)", "pass", "works_over_a_slow_link", T),
    Mutant("threaded", AWAIT, "pass", "works_over_a_slow_link", T),
    Mutant(
        "threaded",
        "with on(self._up):\n            piece.copy_",
        "if True:\n            piece.copy_",
        "works_over_a_slow_link",
        T,
    ),
    Mutant(
        "threaded",
        "with on(self._up):\n            self._call",
        "if True:\n            self._call",
        "wait_orders_streams",
        T,
    ),
    Mutant("threaded", "self._end.record(self._up)", "pass", "wait_orders_streams", T),
    Mutant("threaded", "self._in_flight < SLOTS", "True", "slots_are_reused_safely", T),
    Mutant("threaded", "self._in_flight -= 1", "pass", "slots_are_reused_safely", T),
    Mutant("threaded", "reducing.finish()", "pass", "wait_orders_streams", T),
    # ---- call_order ----
    Mutant("call_order", "stream.wait_event(call.end)", "pass", "calls_on_one_tensor_run_in_order"),
    Mutant("call_order", "native.wait(None)", "pass", "calls_on_one_tensor_run_in_order", T),
    Mutant(
        "device_calls",
        "device.order.follow(tensors, torch",
        "(tensors, torch",
        "calls_on_one_tensor_run_in_order",
    ),
    Mutant(
        "device_calls",
        "device.order.follow(tensors, current)",
        "pass",
        "calls_on_one_tensor_run_in_order",
        T,
    ),
    Mutant(
        "device_calls",
        "device.order.add(call.tensors, (), end)",
        "pass",
        "calls_on_one_tensor_run_in_order",
        F,
    ),
    Mutant(
        "device_calls",
        "device.order.add(call.tensors, work",
        "(call.tensors, work",
        "calls_on_one_tensor_run_in_order",
        T,
    ),
    Mutant(
        "device_calls", "device.order.add(copies", "(copies", "calls_on_one_tensor_run_in_order"
    ),
    # ---- pinned_ring ----
    Mutant(
        "pinned_ring",
        "slot.value = (slot.value + 1) % 2**32",
        "slot.value = 1",
        "works_over_a_slow_link",
        F,
    ),
    Mutant(
        "pinned_ring", "for stream in streams)", "for stream in ())", "closing_waits_for_copies_up"
    ),
    Mutant(
        "pinned_ring",
        "for stream in streams)",
        "for stream in streams[1:])",
        "closing_waits_for_copies_down",
        T,
    ),
    Mutant(
        "pinned_ring", "self._driver.unpin(self.memory.data_ptr())", "pass", "reads_current_stream"
    ),
    # ---- device_calls ----
    Mutant(
        "device_calls",
        "start.record(torch.accelerator.current_stream(where))",
        "pass",
        "reads_current_stream",
        T,
    ),
    Mutant(
        "device_calls",
        "tensor.record_stream(device.up)\n        work",
        "pass\n        work",
        "dropped_tensors_are_kept",
        T,
    ),
    Mutant(
        "device_calls", "(*call.tensors, *call.dense)", "call.tensors", "temporaries_are_kept", T
    ),
    Mutant(
        "device_calls",
        "down.wait_stream(current)",
        "pass",
        "copies_read_current_stream",
        T,
    ),
    Mutant("device_calls", "copied.record(source)", "pass", "copies_over_a_slow_link", T),
    Mutant(
        "device_calls",
        "tensor.record_stream(up)\n\n",
        "pass\n\n",
        "copies_keep_dropped_tensors",
        T,
    ),
    Mutant(
        "device_calls",
        "with torch.inference_mode(), on(up):",
        "with torch.inference_mode():",
        "copies_over_a_slow_link",
        T,
    ),
    Mutant("device_calls", "end.record(up)", "pass", "copies_wait_orders_streams", T),
    Mutant(
        "device_calls",
        "await_device(copied, owner._group, name, None)",
        "pass",
        "copies_over_a_slow_link",
        T,
    ),
    Mutant(
        "device_calls",
        "await_device(copied, host._group, name, None)",
        "pass",
        "copies_over_a_slow_link",
        T,
    ),
    Mutant(
        "device_calls",
        "end.record(torch.accelerator.current_stream(where))",
        "pass",
        "a_group_of_one_orders_streams",
        T,
    ),
    Mutant(
        "device_calls", "device.ring.close(device.down, device.up)", "pass", "reads_current_stream"
    ),
    Mutant(
        "device_calls",
        "    try:\n        task()",
        "    ended()\n    try:\n        task()",
        "works_over_a_slow_link",
        T,
    ),
    Mutant(
        "device_calls",
        "    try:\n        task()",
        "    ended()\n    try:\n        task()",
        "copies_over_a_slow_link",
        T,
    ),
    Mutant(
        "device_calls",
        "finish = partial(_finish_message",
        "ended()\n                finish = partial(_finish_message",
        "copies_over_a_slow_link",
        T,
    ),
    Mutant(
        "device_calls",
        "method(host, *host_args, **kwargs).wait()\n            copy_up()",
        "copy_up()\n            method(host, *host_args, **kwargs).wait()",
        "results_wait_for_peers",
        T,
    ),
    Mutant(
        "device_calls",
        "up.wait_event(copied)",
        "pass",
        "messages_do_not_overtake_readers",
        T,
    ),
    Mutant(
        "device_calls",
        "copied.record(source)",
        "pass",
        "messages_do_not_overtake_readers",
        T,
    ),
    # ---- host_copies ----
    Mutant(
        "host_copies",
        "self._down.wait_stream(torch.accelerator.current_stream(tensor.device))",
        "pass",
        "copies_read_current_stream",
        T,
    ),
    Mutant("host_copies", "self.tensors.append(source)", "pass", "copies_keep_dropped_tensors", T),
    Mutant("host_copies", "with on(self._down):", "if True:", "copies_over_a_slow_link", T),
    # ---- works ----
    Mutant(
        "works",
        "super().wait(timeout)\n        return self._order_stream()",
        "super().wait(timeout)\n        return True",
        "copies_wait_orders_streams",
        T,
    ),
    Mutant(
        "works",
        "super().wait(timeout)\n        return self._order_stream()",
        "super().wait(timeout)\n        return True",
        "wait_orders_streams",
        T,
    ),
    Mutant(
        "works",
        "super().wait(timeout) if timeout else self._order_stream()",
        "True",
        "wait_orders_streams",
        F,
    ),
    Mutant(
        "works",
        "self.exception() is not None or self._end.query()",
        "True",
        "works_end_with_their_copies",
    ),
    Mutant(
        "works",
        "WorkFuture(self._thread, side=self._side)",
        "WorkFuture(self._thread)",
        "futures_order_streams",
        T,
    ),
    Mutant(
        "works",
        "torch.futures.Future(devices=[self._side.device])",
        "torch.futures.Future()",
        "futures_order_streams",
        F,
    ),
    Mutant("works", "self._side.wait_event(self._end)", "pass", "futures_order_streams", F),
    Mutant("works", "with on(self._side):", "if True:", "futures_order_streams", F),
    Mutant(
        "futures",
        "devices=None if side is None else [side.device]",
        "devices=None",
        "futures_order_streams",
        T,
    ),
    Mutant(
        "futures",
        "with nullcontext() if self._side is None else on(self._side):\n            try",
        "if True:\n            try",
        "callbacks_have_a_stream_of_their_own",
        T,
    ),
    Mutant(
        "futures",
        "super().wait()  # orders the current stream",
        "pass",
        "callbacks_keep_what_they_read",
        T,
    ),
]
