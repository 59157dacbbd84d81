"""The calls of one process group on tensors of an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from sdp_plugins.core import Group, ReduceOp, SdpError
from sdp_plugins.core import Work as NativeWork
from sdp_plugins.core._native import Work as UnfinishedWork
from sdp_plugins.core._native import supports
from sdp_plugins.torch.accelerator.call_order import CallOrder
from sdp_plugins.torch.accelerator.device_thread import DeviceThread
from sdp_plugins.torch.accelerator.drivers import Driver, driver_of
from sdp_plugins.torch.accelerator.flagged import FlaggedReducer
from sdp_plugins.torch.accelerator.host_copies import RECEIVES, HostCopies
from sdp_plugins.torch.accelerator.pieces import Reduction
from sdp_plugins.torch.accelerator.pinned_ring import PinnedRing
from sdp_plugins.torch.accelerator.threaded import Reducing, ThreadedReducer, await_device
from sdp_plugins.torch.accelerator.works import DeviceWork, FlaggedWork
from sdp_plugins.torch.callback_thread import CallbackThread
from sdp_plugins.torch.streams import on
from sdp_plugins.torch.tensors import tensors_in, to_reduce
from sdp_plugins.torch.work import PendingWork

Call = TypeVar("Call", bound=Callable[..., Any])
MESSAGES = RECEIVES | {"send"}


class _Device:
    """The streams of one device, and what it can do."""

    def __init__(self, device: torch.device) -> None:
        self.driver: Driver | None = driver_of(device.type)
        self.has_flags = self.driver is not None and self.driver.has_flags(device)
        self.down, self.up, self.side = (torch.Stream(device) for _ in range(3))
        # Of messages: on the streams above, flags wait for other ranks' collectives.
        self.sends, self.receives = (torch.Stream(device) for _ in range(2))
        module = torch.get_device_module(device)
        self.is_capturing = getattr(module, "is_current_stream_capturing", lambda: False)
        self.order = CallOrder()
        self.flagged: FlaggedReducer | None = None
        self.ring: PinnedRing | None = None  # of reductions


def _known_to_peers(method: Call) -> Call:
    """Let the peers know if a call raises because a device has failed."""

    @wraps(method)
    def call(self: DeviceCalls, *args: Any) -> Any:
        try:
            return method(self, *args)
        except RuntimeError:
            self.abort_if_failed()
            raise

    return call  # type: ignore[return-value]


class DeviceCalls:
    """Runs calls on tensors of accelerators, in the order in which they are made.

    Device operations have Groups of their own: on each rank chance decides whether a thread issues
    one before or after the main thread issues an operation on CPU tensors.

    Args:
        world_size: Number of ranks.
        make_group: Returns the Group of a name, of the process group's ranks; a collective.
        make_host_group: Makes a process group, for CPU tensors, over a Group.
        threads: Completes futures of collectives, and of messages.
        pending: The works in flight.
        flags: Whether to use flags where device and group allow it.
    """

    def __init__(
        self,
        world_size: int,
        make_group: Callable[[str], Group],
        make_host_group: Callable[[Group], Any],
        threads: tuple[CallbackThread, CallbackThread],
        pending: dict[PendingWork, None],
        flags: bool,
    ) -> None:
        self._world_size = world_size
        self._make_new_group, self._make_host_group = make_group, make_host_group
        self._groups: dict[str, Group] = {}
        self._callbacks, self._message_callbacks = threads
        self._pending = pending
        self._flags = flags
        self._devices: dict[torch.device, _Device] = {}
        self._thread = DeviceThread("sdp-device")
        self._senders = DeviceThread("sdp-device-send")
        self._host_group: Any = None
        self._reducer: ThreadedReducer | None = None
        self._devices_agree = False
        self._lock = threading.RLock()

    # ---- all_reduce ----------------------------------------------------------------------------

    @_known_to_peers
    def all_reduce(
        self, tensors: Sequence[Tensor], op: ReduceOp, timeout_s: float | None
    ) -> DeviceWork:
        """Reduce tensors of one device and dtype over all ranks, in place.

        With flags or without, the operations of the core are the same.
        """
        device, where = self._device_of(tensors[0]), tensors[0].device
        device.order.follow(tensors, torch.accelerator.current_stream(where))
        call = Reduction.of(tensors, op, timeout_s)
        end = torch.Event(where)
        if self._world_size == 1 and op.factor == 1.0 and supports(call.dtype.native, op.native):
            end.record(torch.accelerator.current_stream(where))
            args = tensors, (), self._callbacks, self._pending, end, device.side
            return FlaggedWork(*args, reducer=None)
        group = self._make_group("device reductions")
        if device.ring is None:
            device.ring = PinnedRing(group, where, device.driver)
            on_one_node = len(group.nodes.members) == 1
            self._flags &= on_one_node and device.has_flags and device.ring.is_pinned
            if not self._devices_agree:  # whether all ranks can: callbacks depend on it
                able = torch.tensor([self._flags], dtype=torch.uint8, device="cpu")
                group.all_reduce(to_reduce(able), "min", timeout_s=timeout_s)
                self._flags, self._devices_agree = bool(able.item()), True
        if not self._flags:
            return self._threaded(group, device, call, end)
        return self._flagged(group, device, call, end)

    def _flagged(
        self, group: Group, device: _Device, call: Reduction, end: torch.Event
    ) -> DeviceWork:
        if device.flagged is None:
            assert device.ring is not None
            assert device.driver is not None
            streams = device.down, device.up
            device.flagged = FlaggedReducer(group, device.ring, device.driver, streams)
        reducer, callbacks = device.flagged, self._callbacks
        with self._lock:
            natives = self._ending_all(group, reducer.start, call, end)
        args = call.tensors, natives, callbacks, self._pending, end, device.side
        work = FlaggedWork(*args, reducer=reducer)
        self._pending[work] = None
        device.order.add(call.tensors, (), end)
        return work

    def _threaded(
        self, group: Group, device: _Device, call: Reduction, end: torch.Event
    ) -> DeviceWork:
        assert device.ring is not None
        if self._reducer is None:
            self._reducer = ThreadedReducer(group)
        where = device.down.device
        start = torch.Event(where)
        start.record(torch.accelerator.current_stream(where))
        reducing = Reducing(call, device.ring, (device.down, device.up), start, end)
        for tensor in (*call.tensors, *call.dense):
            tensor.record_stream(device.down)
            tensor.record_stream(device.up)
        work, ended = self._work(group, device, call.tensors, end, "all_reduce")
        with self._lock:
            run = self._ending_all(group, self._reducer.start, reducing)
            self._thread.put(partial(_run, partial(self._ending_all, group, run), ended))
        device.order.add(call.tensors, work._natives, end)
        return work

    # ---- all other calls -----------------------------------------------------------------------

    @_known_to_peers
    def on_host(
        self, owner: Any, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> DeviceWork:
        """Run a method of a process group on CPU copies of its tensors.

        Args:
            owner: The process group, which runs messages: these match in any order.
            method: The method, as a function.
            args: Its arguments; tensors come first.
            kwargs: Its other arguments.
        """
        tensors = [tensor for tensor in tensors_in(args) if not tensor.is_cpu]
        device = self._device_of(tensors[0])
        where, name = device.down.device, method.__name__
        current = torch.accelerator.current_stream(where)
        if name not in MESSAGES:
            device.order.follow(tensors, current)
        down, up = device.down, device.up
        if name in MESSAGES:
            down, up = device.sends, device.receives
        source = current if name in RECEIVES else down  # nothing goes down of a receive
        if source is down:
            down.wait_stream(current)
        copies = HostCopies(down)
        with torch.inference_mode():
            host_args = copies.of(name, args)
        copied, end = torch.Event(where), torch.Event(where)
        copied.record(source)
        for tensor in copies.tensors:
            if tensor.layout is torch.strided:
                tensor.record_stream(down)
                tensor.record_stream(up)

        def copy_up() -> None:
            up.wait_event(copied)  # a message may come before work that uses the tensor
            with torch.inference_mode(), on(up):
                copies.copy_back()
            end.record(up)

        is_message = name in MESSAGES
        # A message is no collective, so it must not make the Group of collectives.
        host = owner if is_message else self._host()
        work, ended = self._work(host._group, device, copies.tensors, end, name)
        if is_message:

            def pass_on() -> None:
                if name == "send":
                    await_device(copied, owner._group, name, None)
                inner = method(owner, *host_args, **kwargs)
                finish = partial(_finish_message, inner, copy_up, ended)
                self._message_callbacks.when_done(inner._natives, finish)

            if name == "send":
                self._senders.put(partial(_run, pass_on, ended, only_errors=True))
            else:
                pass_on()
            return work

        def run() -> None:
            await_device(copied, host._group, name, None)
            method(host, *host_args, **kwargs).wait()
            copy_up()

        self._thread.put(partial(_run, partial(self._ending_all, host._group, run), ended))
        device.order.add(copies.written, work._natives, end)
        return work

    # ---- what both need ------------------------------------------------------------------------

    def _device_of(self, tensor: Tensor) -> _Device:
        device = self._devices.get(tensor.device)
        if device is None:
            device = self._devices[tensor.device] = _Device(tensor.device)
        if device.is_capturing():
            raise RuntimeError(
                "smddp cannot be captured in a graph of the device: the CPU takes part in its "
                "collectives. Hint: capture forward and backward passes, and call collectives "
                "outside of the graph."
            )
        return device

    def _make_group(self, name: str) -> Group:
        if name not in self._groups:
            self._groups[name] = self._make_new_group(name)
        return self._groups[name]

    def _host(self) -> Any:
        if self._host_group is None:
            self._host_group = self._make_host_group(self._make_group("device"))
        return self._host_group

    def _work(
        self, group: Group, device: _Device, outputs: Sequence[Tensor], end: torch.Event, name: str
    ) -> tuple[DeviceWork, Callable[..., None]]:
        """Return the handle of a thread's call, and the function that ends it."""
        native, errors = UnfinishedWork(), []  # type: tuple[UnfinishedWork, list[BaseException]]

        def ended(error: BaseException | None = None, source_rank: int = -1) -> None:
            if error is not None:
                errors.append(error)
            native.finish(source_rank)

        def finish() -> None:
            if errors:
                raise errors[0]

        thread = self._message_callbacks if name in MESSAGES else self._callbacks
        handle: NativeWork = group.issuer.handle(native, name)
        work = DeviceWork(outputs, [handle], thread, finish, self._pending, end, device.side, group)
        self._pending[work] = None
        return work, ended

    def _ending_all(self, group: Group, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except BaseException as error:
            _end_all(group, error)
            raise

    def abort_if_failed(self) -> None:
        """Let the peers know if a device of this rank has failed."""
        try:
            for device in self._devices:
                torch.Event(device).record(torch.accelerator.current_stream(device))
        except RuntimeError as error:
            for group in self._groups.values():
                _end_all(group, error)

    def unseen_failure(self) -> BaseException | None:
        """Return the error of a call that has been enqueued whole, if nothing has raised it."""
        reducers = (device.flagged for device in self._devices.values())
        failures = (reducer.unseen_failure() for reducer in reducers if reducer)
        return next((failure for failure in failures if failure is not None), None)

    def close(self, at_exit: bool) -> None:
        """End the threads and unpin all memory; the groups are closed.

        Args:
            at_exit: The process ends: it frees all, and the device may be gone.
        """
        self._thread.stop()
        self._senders.stop()
        if self._host_group is not None:
            self._host_group.shutdown()
        for device in self._devices.values():
            if device.ring and not at_exit:
                device.ring.close(device.down, device.up)


def _end_all(group: Group, error: BaseException) -> None:
    """Let the peers know of an error of this rank's device: they wait for this rank."""
    if not isinstance(error, (SdpError, ValueError, TypeError)):
        group.abort(error)


def _run(task: Callable[[], None], ended: Callable[..., None], only_errors: bool = False) -> None:
    error: BaseException | None = None
    try:
        task()
    except BaseException as raised:
        error = raised
    if error is not None or not only_errors:
        ended(error)


def _finish_message(inner: Any, copy_up: Callable[[], None], ended: Callable[..., None]) -> None:
    error: BaseException | None = None
    try:
        inner.wait()
        copy_up()
    except BaseException as raised:
        error = raised
    ended(error, inner.source_rank())
