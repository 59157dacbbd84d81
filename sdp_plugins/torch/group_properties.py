"""The properties that torch queries on a process group."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sdp_plugins.core import Group
from sdp_plugins.torch.backend_name import BACKEND
from sdp_plugins.torch.internals import c10d
from sdp_plugins.torch.options import seconds

_NO_DESCRIPTIONS = ("default_pg", "undefined")


class GroupProperties(dist.ProcessGroup):
    """Names, timeout and capabilities of a process group over a core Group."""

    _group: Group
    _extra_groups: dict[str, Group]

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.world_size)  # type: ignore[call-arg]
        self._group = group
        self._name = self._description = ""
        self.hooks: Any = None
        """The way through torch's hooks; see ``hooks.py``. None while there are none."""
        self.make_part: Callable[..., Any] | None = None
        """Makes the group of some of the ranks; None if torch has not made this group."""
        self.make_again: Callable[..., Any] | None = None
        """Makes what the group needs to go on with other ranks; None as above."""

    def rank(self) -> int:
        """Return this process's rank, which `reconfigure` changes."""
        return self._group.rank

    def size(self) -> int:
        """Return the number of ranks, which `reconfigure` changes."""
        return self._group.world_size

    getRank, getSize = rank, size  # noqa: N815  (the names under which C++ looks for them)

    def getBackendName(self) -> str:  # noqa: N802
        """Return the backend's name in init_process_group()."""
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch assigned."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Store the name that torch assigned."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description that torch or the user gave."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Store the description; one that the user chose appears where waiting ranks are shown."""
        self._description = description
        if description not in ("", *_NO_DESCRIPTIONS):
            self._group.describe(description)

    @property
    def global_ranks(self) -> tuple[int, ...] | None:
        """The ranks' numbers in the default group, or None; see ``Group.global_ranks``."""
        return self._group.global_ranks

    def ended(self) -> list[int]:
        """Return the group's ranks on this node whose processes have ended."""
        return self._group.ended()

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of all later calls."""
        for group in (self._group, *self._extra_groups.values()):
            group.timeout_s = seconds(timeout) or group.timeout_s

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has called; messages show it as "#1"."""
        return self._group.issued

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every operation compares the ranks' numbers."""

    @property
    def options(self) -> Any:
        """The options that torch queries on a backend."""
        return c10d.Backend.Options(BACKEND, timedelta(seconds=self._group.timeout_s))

    @property
    def last_path(self) -> str:
        """The path of the last operation, for logs and tests."""
        return self._group.last_path

    @property
    def _device_types(self) -> list[torch.device]:
        # torch's flight recorder (2.15 and later) cannot record a group without a C++ backend.
        # An empty device list marks this group as one.
        if sys._getframe(1).f_code.co_name == "_maybe_attach_flight_recorder":
            return []
        return [torch.device(kind) for kind in dist.Backend.backend_capability[BACKEND]]

    # torch queries the capabilities of a group's backend; this group is its own backend.
    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def supports_splitting(self) -> bool:
        """Whether `split_group` works; torch allows it on CPUs since version 2.15."""
        return self.make_part is not None

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing where torch has bound the group to a device: the ranks are connected."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing where this rank is not in a new group of the ranks: the others make it."""

    supports_coalescing = False
    supports_time_estimate = False
