"""torch's default process group, made anew for the ranks that are there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sdp_plugins.core import Group, PeerLostError, RendezvousError
from sdp_plugins.core.addresses_and_ports import LOOPBACK
from sdp_plugins.core.config import Config
from sdp_plugins.core.elastic_state import is_asked, lost
from sdp_plugins.core.rank_names import RankNames
from sdp_plugins.core.regroup import Handle, Meeting, Participant, Terms
from sdp_plugins.core.rendezvous import StoreExchange
from sdp_plugins.core.topology import Topology
from sdp_plugins.torch.backend_name import BACKEND
from sdp_plugins.torch.gloo_network import address_on_route_to_master
from sdp_plugins.torch.group_properties import GroupProperties
from sdp_plugins.torch.meeting_store import store_of
from sdp_plugins.torch.store import TorchStore


class DefaultGroup:
    """The default group of a job whose ranks may be lost, and joined by others.

    Its store lives in the process of the lowest rank, and a new group has a new one. So the job
    outlives that process, too.

    Args:
        timeout_s: Time-out of the group's operations, and of a regrouping.
        minimum: How many ranks it needs.

    Raises:
        RuntimeError: There is a default group.
    """

    def __init__(self, timeout_s: float, minimum: int) -> None:
        if dist.is_initialized():
            raise RuntimeError(
                "an elastic training makes torch's default process group, but there is one. Hint: "
                "remove init_process_group()."
            )
        self._timeout_s, self._minimum = timeout_s, minimum
        self._hook: Callable[..., Any] | None = None
        topology, config = Topology.from_env(), Config.from_env()
        host = address_on_route_to_master() or LOOPBACK
        self._participant = Participant(topology.rank, host, config.roster_file)
        try:
            self._begin(topology, config.join)
        except BaseException:
            self._participant.close()
            raise

    def _begin(self, topology: Topology, join: Collection[str] | None) -> None:
        world, timeout_s = topology.world_size, self._timeout_s
        store: dist.Store | None = None  # of rank 0, until all have met
        if join is not None:
            self._participant.invite(map(Handle.parse, join))
        elif world == 1:
            self._participant.meet_all(lambda blob, _: [blob], timeout_s)
        else:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
            keys = TorchStore.of_new_group(store, topology.rank, timeout_s)
            exchange = StoreExchange(keys, "handles", topology.rank, RankNames("handles", world))
            self._participant.meet_all(exchange, timeout_s)
        self._make(())

    @property
    def core(self) -> Group:
        """The default group's core Group."""
        world = dist.group.WORLD
        assert isinstance(world, GroupProperties)
        return world._group

    @property
    def numbers(self) -> list[int]:
        """The ranks' numbers in the job, by rank."""
        return [member.number for member in self._participant.roster.members]

    def is_asked(self, progress: Sequence[int] = ()) -> bool:
        """Return whether a process waits to join, as far as any rank knows; a collective.

        Raises:
            RuntimeError: The ranks have not come equally far.
        """
        return is_asked(self.core, self._participant.waiting(), progress)

    def regroup(self, missed: Collection[int], admits: bool = True) -> None:
        """Make the default group of the ranks that are left, and of those that ask to join.

        Process groups that the program has made are destroyed with the old one.

        Args:
            missed: Numbers of ranks that did not take part in an operation.
            admits: Whether others may join.
        """
        self._destroy()
        self._make(missed, admits)

    def agree(
        self, agree: Callable[[], None], undo: Callable[[], None], admits: bool = True
    ) -> None:
        """Call a collective; if ranks are lost in it, regroup, and call it again.

        Args:
            agree: The collective.
            undo: Called before a regrouping.
            admits: Whether others may join in it.
        """
        while True:
            try:
                return agree()
            except Exception as error:
                failure = lost(error)
                undo()
                self.regroup(failure.global_ranks, admits)

    def _make(self, missed: Collection[int], admits: bool = True) -> None:
        terms = Terms(self._minimum, admits)
        self._participant.regroup(self._form, self._timeout_s, missed, terms)

    def _form(self, meeting: Meeting) -> None:
        timeout, hook = timedelta(seconds=self._timeout_s), self._hook
        try:
            dist.init_process_group(
                BACKEND,
                store=store_of(meeting, self._participant.me.handle.host, self._timeout_s),
                rank=meeting.rank,
                world_size=meeting.world_size,
                timeout=timeout,
                pg_options=meeting,
            )
        except RendezvousError as error:
            if error.kind != "rendezvous":
                raise
            raise PeerLostError(f"the store's rank ended: {error}", ranks=[0]) from error
        self._hook = hook or sys.excepthook
        sys.excepthook = self._hook  # torch sets one more with each group

    def _destroy(self) -> None:
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception:  # of operations in flight, which nobody waits for any more
                if dist.is_initialized():
                    dist.destroy_process_group()

    def close(self) -> None:
        """Destroy the group: to the others, this rank has ended."""
        self._destroy()
        self._participant.close()
