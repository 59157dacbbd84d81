"""The rendezvous of a new process group's ranks, through torch's store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.distributed import Store

from sdp_plugins.core import Group, PeerLostError
from sdp_plugins.core.config import Config
from sdp_plugins.core.internode.mpi import MpiNetwork
from sdp_plugins.core.internode.network_choice import mpi_is_there
from sdp_plugins.core.internode.transport import Network
from sdp_plugins.core.rank_names import DEFAULT, RankNames
from sdp_plugins.core.regroup import Meeting
from sdp_plugins.core.rendezvous.context import RendezvousContext
from sdp_plugins.core.rendezvous.deadline import Deadline
from sdp_plugins.core.rendezvous.failure import RendezvousFailure
from sdp_plugins.core.rendezvous.store_exchange import store_failures
from sdp_plugins.torch.gloo_network import GlooNetwork
from sdp_plugins.torch.groups import smddp_group
from sdp_plugins.torch.options import group_seconds
from sdp_plugins.torch.store import TorchStore

LOOKS = 10
MOST_THREADS = 4
SPIN_US = 500


class TorchRendezvous:
    """The rendezvous of one init_process_group() or new_group(), with c10d's backend options."""

    def __init__(self, options: Any, config: Config, meeting: Meeting | None = None) -> None:
        self._options, self._config, self._meeting = options, config, meeting
        self._members = members = options.global_ranks_in_group
        self._timeout_s = group_seconds(options.timeout, config)
        self._answer_s = config.wait_s if self._timeout_s is None else self._timeout_s
        # torch names the default group "0".
        name = options.group_id if members else DEFAULT
        names = RankNames(name, options.group_size, _global_ranks(members))
        if meeting is not None:
            names = meeting.names
        self._context = RendezvousContext(options.group_rank, names, Deadline(self._answer_s))

    def make_group(self) -> Group:
        """Create the group.

        Raises:
            RendezvousError: The ranks did not find each other.
        """
        context = self._context
        with self._naming_lost(self._ended_members):
            with store_failures(context):
                store = TorchStore.of_new_group(self._options.store, context.rank, self._answer_s)
            self._store = store
            if self._meeting is None:
                return self._make("main", context.names, self._check_members, self._config)
            rank, network = context.rank, self._network(store.under("main").raw)
            return Group.from_exchange(
                self._meeting, rank, context.names, self._timeout_s, network, self._config
            )

    def make_extra_group(self, group: Group, name: str, for_devices: bool = False) -> Group:
        """Create another group of the same ranks; called on all of them.

        Args:
            group: The group from `make_group`. It may already be closed, as a future's callback may
                create another group at any time.
            name: The name of the new group.
            for_devices: Whether its operations are on tensors of an accelerator.
        """

        def check() -> None:
            if group.closed or group.failure is not None:
                raise TimeoutError("the group has ended")
            self._raise_if_lost(group.ended())

        names = self._context.names
        config = for_device_tensors(self._config, group.local_size) if for_devices else self._config
        with self._naming_lost(group.ended):
            return self._make(name, replace(names, group=f"{names.group}, {name}"), check, config)

    def _make(self, key: str, names: RankNames, check: Callable[[], None], config: Config) -> Group:
        store, rank = self._store.under(key, check), self._context.rank
        network = self._network(store.raw)
        return Group.from_names(store, rank, names, self._timeout_s, network, config)

    def _network(self, store: Store) -> Network:
        internode = self._config.internode
        by_mpi = mpi_is_there() if internode is None else internode == "mpi"
        return MpiNetwork() if by_mpi else GlooNetwork(store)

    def _check_members(self) -> None:
        self._raise_if_lost(self._ended_members())

    def _ended_members(self) -> list[int]:
        """Return the ranks of a new group that have ended, as the default group reports them."""
        world = smddp_group()
        if not self._members or world is None:
            return []
        return [self._members.index(one) for one in world.ended() if one in self._members]

    @contextmanager
    def _naming_lost(self, ended: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Have an error name ranks that have ended, if any: one that ends may serve the store."""
        try:
            yield
        except PeerLostError:
            raise
        except Exception as error:
            for _ in range(LOOKS):  # the store's error may come first
                self._raise_if_lost(ended(), error)
                time.sleep(0.005)
            raise

    def _raise_if_lost(self, ended: Sequence[int], cause: Exception | None = None) -> None:
        if ended:
            what = f"{self._context.names.list(ended)} ended before the group was made"
            raise self._context.error(RendezvousFailure.lost(what, ended)) from cause


def for_device_tensors(config: Config, local_ranks: int) -> Config:
    """Return the settings of a group that reduces tensors of accelerators.

    Its ranks compute elsewhere, so cores are free: half of a rank's share them the work, and they
    poll for the next piece, as the pieces of a tensor follow each other within microseconds.
    """
    cores = len(os.sched_getaffinity(0)) // local_ranks
    if config.engine_threads == 1:
        config = replace(config, engine_threads=max(1, min(MOST_THREADS, cores // 2)))
    if config.spin_us is None and cores >= 2 * config.engine_threads >= 4:
        config = replace(config, spin_us=SPIN_US)
    return config


def _global_ranks(members: Sequence[int]) -> tuple[int, ...] | None:
    """Return the ranks that messages show; None for the default group, which finds them itself.

    torch's numbers are the job's if the launcher's do not tell all ranks apart, for example if it
    only numbers nodes.
    """
    if not members:
        return None
    world = smddp_group()
    known = world.global_ranks if world is not None else None
    return tuple(known[member] for member in members) if known else tuple(members)
