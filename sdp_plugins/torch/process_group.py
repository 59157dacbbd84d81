"""The process group behind `init_process_group("smddp")`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from sdp_plugins.core import Group, PeerLostError, SdpError
from sdp_plugins.core.config import Config
from sdp_plugins.core.internode.choice import mpi_is_there
from sdp_plugins.core.internode.mpi import MpiNetwork
from sdp_plugins.core.internode.wire import Network
from sdp_plugins.core.rank_names import DEFAULT, RankNames
from sdp_plugins.core.rendezvous.context import RendezvousContext
from sdp_plugins.core.rendezvous.deadline import Deadline
from sdp_plugins.core.rendezvous.exchange import store_failures
from sdp_plugins.core.rendezvous.failure import ReasonError
from sdp_plugins.torch.broadcast_gather_scatter import BroadcastGatherScatter
from sdp_plugins.torch.exchanges import Exchanges
from sdp_plugins.torch.gloo_network import GlooNetwork
from sdp_plugins.torch.group_properties import BACKEND
from sdp_plugins.torch.options import group_seconds
from sdp_plugins.torch.reductions import Reductions
from sdp_plugins.torch.store import TorchStore
from sdp_plugins.torch.store_shutdown import StoreShutdown


class ProcessGroup(Reductions, BroadcastGatherScatter, Exchanges):
    """c10d over a core Group, for CPU tensors."""


def create(options: Any, pg_options: Any = None) -> ProcessGroup:
    """Make the group of one init_process_group() or new_group(); called on each of its ranks.

    Args:
        options: c10d's DistributedBackendOptions.
        pg_options: Options of another backend; smddp has none.

    Raises:
        TypeError: `pg_options` were given.
        ValueError: A variable of the environment has a value that cannot be used.
        RendezvousError: The ranks did not find each other.
    """
    if pg_options is not None:
        raise TypeError(f"{BACKEND} takes no pg_options, but got {type(pg_options).__name__}.")
    config = Config.from_env()  # wrong settings are told before anybody waits
    rank, size = options.group_rank, options.group_size
    members = options.global_ranks_in_group
    # torch's own name of the default group is "0".
    name = options.group_id if members else DEFAULT
    global_ranks = _numbers(members)
    timeout_s = group_seconds(options.timeout, config)
    answer_s = config.wait_s if timeout_s is None else timeout_s
    context = RendezvousContext(rank, RankNames(name, size, global_ranks), Deadline(answer_s))

    def look() -> None:
        if lost := _lost(context, members):
            raise lost

    def meet(part: TorchStore, name: str) -> Group:
        by_mpi = mpi_is_there() if config.internode is None else config.internode == "mpi"
        network: Network = MpiNetwork() if by_mpi else GlooNetwork(part.raw)
        names = RankNames(name, size, global_ranks)
        return Group.from_names(part, rank, names, timeout_s, network, config)

    try:
        with store_failures(context):
            store = TorchStore.of_new_group(options.store, rank, answer_s)
        group = meet(store.under("main", look), name)
    except Exception as error:
        # A rank that has ended may have served the store, which is noticed sooner.
        if not isinstance(error, PeerLostError) and (lost := _lost(context, members, 10)):
            raise lost from error
        raise

    def look_at_end() -> None:
        """A lane is made in a future's callback, when the group may be at its end."""
        if group.closed or group.failure is not None:
            raise TimeoutError("the group has ended")

    return ProcessGroup(
        group,
        lambda lane: meet(store.under(lane, look_at_end), f"{name}, {lane}"),
        config.register,
        None if members or rank == 0 else StoreShutdown.of(options.store),
    )


def _numbers(members: Sequence[int]) -> tuple[int, ...] | None:
    """What messages call the ranks of a new group; None: the default group finds out.

    torch's numbers are the job's where its launcher does not tell all ranks apart, as one that
    numbers nodes.
    """
    if not members:
        return None
    world = dist.group.WORLD
    known = world.global_ranks if isinstance(world, ProcessGroup) else None
    return tuple(known[member] for member in members) if known else tuple(members)


def _lost(context: RendezvousContext, members: Sequence[int], looks: int = 1) -> SdpError | None:
    """The error for a new group of which a rank has ended, as the default group sees it."""
    world = dist.group.WORLD
    if not members or not isinstance(world, ProcessGroup):
        return None
    for look in range(looks):
        if look:
            time.sleep(0.005)
        ended = [one for one in world.ended() if one in members]
        if ended:
            lost = [members.index(one) for one in ended]
            what = f"{context.names.list(lost)} ended before the group was made"
            return context.error(ReasonError.lost(what, lost).reason)
    return None
