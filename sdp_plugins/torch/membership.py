"""Groups of some of a group's ranks, and a group that goes on with other ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from sdp_plugins.core import RendezvousError
from sdp_plugins.core.addresses_and_ports import LOOPBACK
from sdp_plugins.core.regroup import Handle, Meeting, Participant, Terms
from sdp_plugins.torch.device_backend import DeviceBackend
from sdp_plugins.torch.gloo_network import address_on_route_to_master
from sdp_plugins.torch.internals import TAKES_BACKENDS
from sdp_plugins.torch.options import seconds
from sdp_plugins.torch.process_group_lifecycle import ProcessGroupBase
from sdp_plugins.torch.work import Work


class Membership(ProcessGroupBase):
    """torch's calls that change who is in a group; version 2.14 and later."""

    _participant: Participant | None = None

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Any:
        """Make the group of some of the ranks, which call it; the others get None."""
        assert self.make_part is not None
        part = self.make_part(new_ranks, group_name, timeout)
        if part is not None:
            part.setGroupName(group_name)
            part.setGroupDesc(group_desc or "undefined")
        return part

    @property
    def supports_shrinking(self) -> bool:
        """Whether `shrink` works."""
        return TAKES_BACKENDS and self.make_part is not None

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts: Any = None
    ) -> Any:
        """Make the backend of the other ranks, which call it, as `dist.shrink_group` does."""
        assert self.make_part is not None
        left = [rank for rank in range(self.size()) if rank not in ranks_to_exclude]
        if shrink_flags:
            self.abort("shrink_group() was called with SHRINK_ABORT")
        name = f"{self.getGroupName()} without {', '.join(map(str, ranks_to_exclude))}"
        timeout = timedelta(seconds=self._group.timeout_s)
        return DeviceBackend(self.make_part(left, name, getattr(opts, "_timeout", timeout)))

    @property
    def supports_reconfigure(self) -> bool:
        """Whether `reconfigure` works."""
        return TAKES_BACKENDS and self.make_again is not None

    def get_reconfigure_handle(self) -> str:
        """Return this process's address for `reconfigure`; it is secret."""
        return str(self._listening().me.handle)

    def reconfigure(self, opts: Any) -> Work:
        """Go on as the group of other ranks; a collective of all of them, which returns at its end.

        Args:
            opts: The ranks' handles, in their order, or as a set, which is sorted; a `uuid` that is
                the same on all; a timeout, or None for the group's.

        Raises:
            ValueError: This process's handle is missing, or is no handle.
            RendezvousError: The ranks have different uuids, or did not meet.
        """
        in_order = opts.handles if isinstance(opts.handles, list) else sorted(opts.handles)
        participant = self._listening()
        participant.expect([Handle.parse(handle) for handle in in_order])
        limit_s = seconds(opts.timeout) or self._group.timeout_s
        self._end()  # whoever still waits for this rank hears that it has left
        form = partial(self._form, opts.uuid, limit_s)
        participant.regroup(form, limit_s, (), Terms(len(in_order)))
        return Work((), self._callback_thread)

    def _form(self, uuid: int, limit_s: float, meeting: Meeting) -> None:
        assert self.make_again is not None
        world = dist.distributed_c10d._world
        mine = json.dumps([uuid, world.group_count]).encode()
        told = [json.loads(blob) for blob in meeting(mine, limit_s)]
        if len({one[0] for one in told}) > 1:
            raise RendezvousError(
                f"reconfigure: the ranks pass different uuids, {[one[0] for one in told]}. "
                "Hint: pass one number, another one each time, on all ranks."
            )
        timeout = timedelta(seconds=self._group.timeout_s)
        arguments, store, self.make_part = self.make_again(
            meeting, self._listening().me.handle.host, timeout
        )
        self.begin_again(*arguments)
        if dist.group.WORLD is self:  # so that new_group() works, also on ranks that are new
            world.pg_map[self] = world.pg_map[self][0], store
            world.pg_group_ranks[self] = {rank: rank for rank in range(self.size())}
            world.group_count = max(one[1] for one in told)

    def _listening(self) -> Participant:
        if self._participant is None:
            self._participant = Participant(0, address_on_route_to_master() or LOOPBACK, None)
        return self._participant

    def shutdown(self) -> None:
        """Leave the group; every later call raises."""
        super().shutdown()
        if self._participant is not None:
            self._participant.close()
            self._participant = None
