"""torch's hooks around each call: pre-hooks, post-hooks, its flight recorder, its check for NaN.

They run in torch's C++, which a call of a ProcessGroup in Python does not pass. Once a group has a
hook, its calls take the way through a group of torch's own, whose backend it is; that costs 6 us a
call, and what the hook takes. Without hooks they do not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from sdp_plugins.core.environment import environment
from sdp_plugins.torch.device_backend import CALLS, DeviceBackend
from sdp_plugins.torch.internals import hook_of
from sdp_plugins.torch.torch_dispatch import NO_MEMORY

RECORDER = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
NAN_CHECK = "TORCH_DIST_NAN_CHECK"
NO_COLLECTIVES = frozenset(name for name in CALLS if name.startswith("_")) | {
    "abort",
    "getBackendName",
    "set_timeout",
    "shutdown",
}


class Hooks:
    """The way of a group's calls through torch's C++.

    Attributes:
        through: A group of torch's, whose hooks see each call.

    Args:
        group: A process group of smddp.
    """

    def __init__(self, group: Any) -> None:
        self._calls = threading.local()
        backend = DeviceBackend(group)
        for name in {*CALLS} - NO_COLLECTIVES:
            setattr(backend, name, partial(self._run, getattr(group, name)))
        self.through: Any = dist.ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]
        custom = dist.ProcessGroup.BackendType.CUSTOM
        self.through._set_default_backend(custom)
        for device in group._device_types:
            self.through._register_backend(device, custom, backend)
        self.through._set_group_name(group.getGroupName())
        self.through._set_group_desc(group.getGroupDesc())
        self._keep: list[Any] = []

    @property
    def by_reducer(self) -> bool:
        """Whether DDP's reducer makes this thread's call."""
        return getattr(self._calls, "by_reducer", False)

    @by_reducer.setter
    def by_reducer(self, value: bool) -> None:
        self._calls.by_reducer = value

    @property
    def passed(self) -> bool:
        """Whether this thread's call has passed the hooks, and the group is to run it."""
        return getattr(self._calls, "works", None) is not None

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make a call that the hooks see; return the group's own handle of it."""
        works: list[Any] = []
        self._calls.works = works
        try:
            getattr(self.through, name)(*args, **kwargs)
        finally:
            self._calls.works = None
        if not works:
            raise ValueError(NO_MEMORY)
        for other in works[:-1]:  # a Tensor subclass may turn one call into several
            other.wait()
        return works[-1]

    def _run(self, method: Callable[..., Any], *args: Any) -> Any:
        work = method(*args)
        self._calls.works.append(work)
        return work

    def attach_what_is_asked_for(self, ranks: Sequence[int]) -> None:
        """Attach what the environment asks for."""
        variables = environment()
        if records(variables):
            self._keep.append(hook_of("FlightRecorderHook").attach(self.through, list(ranks)))
        if variables.get(NAN_CHECK) == "1":
            hook_of("NanCheckHook").attach(self.through)


def records(variables: dict[str, str]) -> bool:
    """Return whether torch's flight recorder is asked for; torch 2.15 itself always records."""
    if not hasattr(dist.distributed_c10d, "_maybe_attach_flight_recorder"):
        return False
    size = next((variables[name] for name in RECORDER if variables.get(name)), "0")
    return size.strip().isdecimal() and int(size) > 0


def are_asked_for() -> bool:
    """Return whether the environment asks for hooks."""
    variables = environment()
    return records(variables) or variables.get(NAN_CHECK) == "1"
