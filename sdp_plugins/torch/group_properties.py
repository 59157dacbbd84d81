"""What torch asks a process group about itself."""

from __future__ import annotations

import sys
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
    """Names, time-out and abilities of a process group over a core Group."""

    _group: Group

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.world_size)  # type: ignore[call-arg]
        self._group = group
        self._extra_groups: dict[str, Group] = {}  # of the same ranks; see ProcessGroupBase
        self._name = self._description = ""

    def getBackendName(self) -> str:  # noqa: N802
        """The name in init_process_group()."""
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802
        """The name that torch gave."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name from torch."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description that torch or the user gave."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Take the description; one that somebody chose is shown where the ranks' waits are."""
        self._description = description
        if description not in ("", *_NO_DESCRIPTIONS):
            self._group.describe(description)

    @property
    def global_ranks(self) -> tuple[int, ...] | None:
        """See ``Group.global_ranks``."""
        return self._group.global_ranks

    def ended(self) -> list[int]:
        """The group's ranks on this node whose processes have ended."""
        return self._group.ended()

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time-out of all later calls."""
        for group in (self._group, *self._extra_groups.values()):
            group.timeout_s = seconds(timeout) or group.timeout_s

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        """Collectives that this rank has called so far, in messages "#1" and so on."""
        return self._group.issued

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the ranks' numbers are compared in every operation."""

    @property
    def options(self) -> Any:
        """What torch asks a backend for."""
        return c10d.Backend.Options(BACKEND, timedelta(seconds=self._group.timeout_s))

    @property
    def last_path(self) -> str:
        """The path that the last operation took, for logs and tests."""
        return self._group.last_path

    @property
    def _device_types(self) -> list[torch.device]:
        # torch's flight recorder (2.15 and later) cannot record a group without a backend in C++,
        # by which it means one without devices.
        if sys._getframe(1).f_code.co_name == "_maybe_attach_flight_recorder":
            return []
        return [torch.device("cpu")]

    # torch asks a group's backend for its abilities; the group is its own.
    def _get_backend(self, device: torch.device) -> Any:
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
