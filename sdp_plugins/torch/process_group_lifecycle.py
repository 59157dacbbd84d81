"""The base of all calls of a process group: their Group, and works that outlive their callers."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sdp_plugins.core import Buffer, Group, ReduceOp, SdpError
from sdp_plugins.core import Work as NativeWork
from sdp_plugins.core.config import Config
from sdp_plugins.torch import debug_detail
from sdp_plugins.torch.bucket_registration import Registrations
from sdp_plugins.torch.callback_thread import CallbackThread
from sdp_plugins.torch.group_properties import GroupProperties
from sdp_plugins.torch.options import CallOptions, Launch
from sdp_plugins.torch.profiling import ProfiledCall, begin, enqueuing
from sdp_plugins.torch.sparse import SparseSum
from sdp_plugins.torch.store_shutdown import StoreShutdown
from sdp_plugins.torch.tensors import Outputs, readable, same_dtype, tensor_of
from sdp_plugins.torch.work import PendingWork, Work

if TYPE_CHECKING:
    from sdp_plugins.torch.accelerator.device_calls import DeviceCalls

DRAIN_S = 0.5
log = logging.getLogger(__name__)

Copies = Outputs | SparseSum
"""Finishes a call once its operations are done."""


class ProcessGroupBase(GroupProperties):
    """The life cycle of a process group over a core Group, and the execution of its calls.

    Args:
        group: The Group that runs the operations.
        make_group: Creates another Group of the same ranks, with a name; called on all ranks.
        register: Whether to move buckets into shared memory.
        store_shutdown: Delays the exit until rank 0's store has ended.
    """

    def __init__(
        self,
        group: Group,
        make_group: Callable[..., Group],
        register: bool,
        store_shutdown: StoreShutdown | None = None,
    ) -> None:
        super().__init__(group)
        self._pid = os.getpid()
        self._detail = debug_detail.is_on()
        # Works that DDP.join() passes to a module's reducer, which keeps only their C++ half.
        self._of_join: weakref.WeakKeyDictionary[Any, Work] = weakref.WeakKeyDictionary()
        self._begin(group, make_group, register, store_shutdown)

    def begin_again(self, *arguments: Any) -> None:
        """Go on over another Group, of other ranks; the arguments are those of the class."""
        self._end()
        self._begin(*arguments)

    def _begin(
        self,
        group: Group,
        make_group: Callable[..., Group],
        register: bool,
        store_shutdown: StoreShutdown | None = None,
    ) -> None:
        self._group, self._make_group = group, make_group
        self._extra_groups: dict[str, Group] = {}  # of the same ranks
        self.sharded_optimizers = 0  # that were ever made; each has an extra group
        self._callback_thread = CallbackThread("sdp-futures")
        self._message_thread = CallbackThread("sdp-p2p-futures", in_order=False)
        self._profiler_thread = CallbackThread(
            "sdp-profiler", in_order=False
        )  # no user's callback delays it
        # In flight; kept even if the caller drops them. A work removes itself when it is done.
        self._works: OrderedDict[PendingWork, None] = OrderedDict()
        self._registrations = Registrations(group, register and group.world_size > 1)
        self._store_shutdown = store_shutdown
        self.kept_until_end: list[object] = []
        self._device_calls: dict[str, DeviceCalls] = {}
        self._end = weakref.finalize(
            self,
            _end,
            self._pid,
            group,
            self._extra_groups,
            self._device_calls,
            (self._callback_thread, self._message_thread, self._profiler_thread),
            self._works,
            self.kept_until_end,
        )

    def _current_group(self) -> Group:
        """Return the Group that a call from this thread uses.

        Callbacks of futures have a Group of their own. Their operations are in the same order there
        on all ranks, while the order between a callback and the main thread is undefined. Sends and
        receives match by ranks and tag in any thread, so they use the main Group.
        """
        if os.getpid() != self._pid and (failure := self._group.failure) is not None:
            raise failure  # before taking a lock that the parent may have held in the fork
        if self._registrations.dead:
            self._registrations.drop_dead()
        if not self._callback_thread.in_callback():
            return self._group
        return self._extra_group("callbacks")

    def _extra_group(self, name: str, for_devices: bool = False) -> Group:
        """Return another Group of the same ranks; the first call for a name is a collective."""
        if name not in self._extra_groups:
            made = self._make_group(name, for_devices=for_devices)
            made.timeout_s = self._group.timeout_s  # set_timeout() may have changed it
            self._extra_groups[name] = made
        return self._extra_groups[name]

    def _reduce_on_device(
        self, tensors: Sequence[Tensor], op: ReduceOp, timeout_s: float | None
    ) -> Work:
        """Reduce tensors of an accelerator over all ranks, in place."""
        if self._detail:
            self._compare_shapes("all_reduce", tensors, timeout_s)
        self._forget_done()
        with enqueuing("all_reduce", (tensors,), self._profiler_thread):
            return self._calls_on_device().all_reduce(tensors, op, timeout_s)

    def call_on_device(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Work:
        """Run a method whose tensors are on an accelerator on copies of them."""
        self._forget_done()
        with enqueuing(method.__name__, args, self._profiler_thread):
            return self._calls_on_device().on_host(self, method, args, kwargs)

    def _calls_on_device(self) -> DeviceCalls:
        """Return what runs device operations of this thread; see ``_current_group``."""
        self._current_group()
        prefix = "callbacks, " if self._callback_thread.in_callback() else ""
        if prefix not in self._device_calls:
            from sdp_plugins.torch.accelerator.device_calls import DeviceCalls

            make_extra, own = self._make_group, weakref.WeakMethod(self._extra_group)
            kind = type(self)

            def make_group(name: str) -> Group:
                if (make := own()) is None:
                    raise SdpError("the process group is gone", kind="closed")
                return make(prefix + name, for_devices=True)

            def make_host_group(group: Group) -> ProcessGroupBase:
                def make_other(name: str, **options: Any) -> Group:
                    return make_extra(f"{prefix}device, {name}", **options)

                return kind(group, make_other, False)

            self._device_calls[prefix] = DeviceCalls(
                self._group.world_size,
                make_group,
                make_host_group,
                (self._callback_thread, self._message_thread),
                self._works,
                Config.from_env().device_flags,
            )
        return self._device_calls[prefix]

    def _compare_shapes(
        self, name: str, tensors: Sequence[Tensor], timeout_s: float | None
    ) -> None:
        """Apply the check of TORCH_DISTRIBUTED_DEBUG=DETAIL before a call."""
        group = self._current_group()
        shapes = "shapes" if group is self._group else "callbacks, shapes"
        debug_detail.compare_shapes(group, self._extra_group(shapes), name, tensors, timeout_s)

    def _run(
        self,
        name: str,
        launches: Sequence[Launch],
        options: CallOptions,
        outputs: Sequence[Tensor] = (),
        inputs: Sequence[Tensor] = (),
        copies: Copies | None = None,
    ) -> Work:
        """Start core operations and return one work for all of them.

        Args:
            name: The call's name in torch's profiler.
            launches: One launch for each operation.
            options: Whether the call is asynchronous, and its timeout. A synchronous call runs
                here.
            outputs: Tensors that receive the result.
            inputs: Tensors that are only read.
            copies: Copies to make once the operations are done.
        """
        async_op, timeout_s = options
        if self._detail:
            compared = debug_detail.compared(name, outputs, inputs) if len(launches) == 1 else ()
            self._compare_shapes(name, compared, timeout_s)
        event = begin(name, inputs or outputs)
        if async_op:
            natives = [launch(async_op=True, timeout_s=timeout_s) for launch in launches]
            return self._track(natives, outputs, inputs, copies, self._callback_thread, event)
        try:
            for launch in launches:
                launch(async_op=False, timeout_s=timeout_s)
        finally:
            if event is not None:
                self._profiler_thread.when_done((), event.end)
                event.wait()
        if copies is not None:
            copies.copy_back()
        if self._works:
            self._forget_done()  # all earlier works are done by now
        return Work(outputs, self._callback_thread)

    def _track(
        self,
        natives: Sequence[NativeWork],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        copies: Copies | None,
        thread: CallbackThread,
        event: ProfiledCall | None,
    ) -> Work:
        finish = None if copies is None else copies.copy_back
        self._forget_done()
        work = PendingWork(outputs, inputs, natives, thread, finish, self._works, event)
        self._works[work] = None
        if event is not None:
            self._profiler_thread.when_done(natives, event.end)
        return work

    def _run_pairs(
        self,
        name: str,
        launch: Launch,
        pairs: tuple[Sequence[Tensor], Sequence[Tensor]],
        options: CallOptions,
        to_buffer: Callable[[Tensor], Buffer],
        *arguments: Any,
    ) -> Work:
        """Start an operation, a method of a Group, for each pair of output and input."""
        outputs, inputs = pairs
        copies = Outputs(list(zip(*pairs, strict=True)) if len(outputs) > 1 else ())
        launches, dense_inputs = [], []
        for output, input in zip(outputs, inputs, strict=True):
            same_dtype([output, input])
            source = readable(input)
            target = to_buffer(copies.dense(output))
            launches.append(partial(launch, target, to_buffer(source), *arguments))
            dense_inputs.append(source)
        return self._run(name, launches, options, outputs, dense_inputs, copies)

    def _check_parts(self, name: str, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Check before the first of several operations that wholes have room for all parts."""
        if len(wholes) == 1:
            return  # the Group checks it
        for whole, part in zip(wholes, parts, strict=True):
            count = tensor_of(part).numel()
            world, given = self._group.world_size, tensor_of(whole).numel()
            if given != world * count:
                raise ValueError(
                    f"{name} needs {world * count} elements ({world} ranks x {count}), got "
                    f"{given}. Hint: pass a tensor that holds one part for each rank."
                )

    def _forget_done(self) -> None:
        """Drop finished works; check them in rotation until two are found in flight."""
        pending = 0
        while pending < 2 and (work := self._oldest()) is not None:
            if work.is_completed():
                self._works.pop(work, None)
            else:
                with suppress(KeyError):  # another thread has completed it meanwhile
                    self._works.move_to_end(work)
                pending += 1

    def _oldest(self) -> PendingWork | None:
        try:
            return next(iter(self._works), None)
        except RuntimeError:  # a call of another thread interfered; a later call will look again
            return None

    def uses(self, storage: int) -> bool:
        """Return whether an operation in flight uses the storage with this `_cdata`."""
        works = list(self._works)
        return any(not work.is_completed() and work.touches(storage) for work in works)

    def shutdown(self) -> None:
        """Leave the group; every later call raises."""
        ours = os.getpid() == self._pid
        failed = ours and self._group.failure is not None
        unseen = None
        try:
            if self._end.alive and ours and not failed:
                for calls in list(self._device_calls.values()):
                    calls.abort_if_failed()
                self._drain()
                unseen = self._unseen_failure()
        finally:
            self._end()
        store_shutdown, self._store_shutdown = self._store_shutdown, None
        if ours and store_shutdown is not None:
            # The other ranks know by now that this rank has left.
            store_shutdown.follow(self._group, failed or unseen is not None)
        if unseen is not None:
            if sys.exc_info()[1] is None:
                raise unseen
            log_unseen(unseen)  # an error that is on its way says more

    def _unseen_failure(self) -> BaseException | None:
        """Return the error of a reduction on a device that no call has raised, if there is one."""
        failures = (calls.unseen_failure() for calls in self._device_calls.values())
        return next((failure for failure in failures if failure is not None), None)

    def _drain(self) -> None:
        """Wait for promised results; briefly for collectives that no caller waited for.

        Peers need this rank's part of both. After an error, promises are void.
        """
        deadline = time.monotonic() + DRAIN_S
        keeps_promises = sys.exc_info()[1] is None
        for work in list(self._works):
            left_s = deadline - time.monotonic()
            if keeps_promises and work.is_promised:
                left_s = self._group.timeout_s
            if left_s > 0 and work.is_collective:  # a time-out of 0 means the group's
                work.settle(timedelta(seconds=left_s))

    def abort(self, reason: str | BaseException = "abort() was called") -> None:
        """Leave the group immediately; peers get PeerLostError with the reason."""
        if self._end.alive and os.getpid() == self._pid:
            for group in (self._group, *self._extra_groups.values()):
                group.abort(reason)
        self._end()


def log_unseen(failure: BaseException) -> None:
    """Log the error of a reduction on a device that no call can raise any more."""
    log.error("the results of a reduction are NaN: %s", failure)


def uncaught_at_exit() -> BaseException | None:
    """Return the uncaught exception that is ending this process, or None."""
    if threading.main_thread().is_alive():
        return None
    return getattr(sys, "last_value", None)


def _end(
    pid: int,
    group: Group,
    extra_groups: dict[str, Group],
    device_calls: dict[str, DeviceCalls],
    threads: tuple[CallbackThread, ...],
    works: dict[PendingWork, None],
    kept: list[object],
) -> None:
    """Close all groups; the argument `works` keeps their tensors alive until then."""
    if os.getpid() != pid:
        return  # a forked child: threads and segments belong to its parent
    error = uncaught_at_exit()
    for calls in device_calls.values():
        if error is None and (unseen := calls.unseen_failure()) is not None:
            log_unseen(unseen)
    for closing in (group, *extra_groups.values()):
        if error is not None:
            closing.abort(error)
        with suppress(SdpError):  # the group failed earlier, and the waiting callers got the error
            closing.close()
    for calls in device_calls.values():
        calls.close(at_exit=not threading.main_thread().is_alive())
    for thread in threads:
        thread.stop()
    works.clear()
    kept.clear()
