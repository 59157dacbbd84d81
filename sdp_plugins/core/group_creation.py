"""Connects the ranks of a new group: from an exchange of small blobs to shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import _native
from .buffers import Buffer
from .config import Config
from .endpoint import Endpoint
from .error_file import write_uncaught
from .internode.spanning_group import SpanningGroup
from .internode.transport import Network
from .nodes import Nodes
from .process_identity import clock_id, namespace, process_identity
from .rank_info import RankInfo, group_token
from .rank_names import RankNames, printable
from .rendezvous import Exchange, Rendezvous, meet
from .rendezvous.failure import RendezvousFailure
from .stack_dump import dump_on_signal
from .topology import Topology, place_in_job
from .wire_dtype import WireDType

_MOST_CHARS = 60


@dataclass(frozen=True)
class Membership:
    """A rank's place in a group, and the object that runs its operations.

    Attributes:
        nodes: All ranks of the group by node.
        info: This rank, as its segment describes it.
        node: The native group of this node's ranks.
        endpoint: Runs the operations of this rank.
        release: See ``Issuer``.
    """

    nodes: Nodes
    info: RankInfo
    node: _native.NativeGroup
    endpoint: Endpoint
    release: Callable[[list[Buffer]], None]


def n_exchanges(nodes: int) -> int:
    """Number of all-gathers that ``bring_up`` makes for this number of nodes."""
    return 1 if nodes == 1 else 3


def bring_up(
    rank: int,
    names: RankNames,
    exchange: Exchange,
    timeout_s: float,
    config: Config,
    network: Network | None = None,
) -> Membership:
    """Find the other ranks and connect to them.

    Maps the segments of the ranks on this node, and opens the network if there are other nodes.

    Args:
        rank: This rank.
        names: The group and its ranks.
        exchange: All-gathers blobs among exactly these ranks.
        timeout_s: Deadline for all of it.
        config: Settings; ``staging_bytes`` must be equal on all ranks.
        network: Between nodes; None if there is none.

    Raises:
        RendezvousError: The ranks could not find each other, or must not connect.
        PeerLostError: A rank's process ended.
        SharedMemoryError: Memory could not be created or mapped.
    """
    dump_on_signal()
    write_uncaught()
    place = place_in_job()
    with meet(rank, names, exchange, timeout_s, -1 if place is None else place.rank) as rendezvous:
        nodes = rendezvous.nodes
        if nodes.count > 1 and network is None:
            raise rendezvous.context.error(_no_network(rank, nodes))
        info = _rank_info(rendezvous, names.group, place)
        node = _share_memory(rendezvous, nodes.members[nodes.node_of(rank)], info, config)
    if network is None or nodes.count == 1:
        return Membership(nodes, info, node, node, list.clear)
    group = _span_nodes(rendezvous, exchange, node, network, config)
    return Membership(nodes, info, node, group, group.release)


def _span_nodes(
    rendezvous: Rendezvous,
    exchange: Exchange,
    node: _native.NativeGroup,
    network: Network,
    config: Config,
) -> SpanningGroup:
    """Join the node's ranks with those of other nodes."""
    context, nodes = rendezvous.context, rendezvous.nodes
    try:
        _agree(rendezvous, exchange, network, config)
        left_s = context.deadline.remaining_s
        channel = network.open(context.rank, nodes, exchange, context.names.group, left_s)
    except BaseException:
        node.close()
        raise
    return SpanningGroup(context.rank, nodes, node, channel, WireDType.parse(config.wire_dtype))


def _agree(rendezvous: Rendezvous, exchange: Exchange, network: Network, config: Config) -> None:
    """Check that all ranks would use the network in the same way."""
    context, setting = rendezvous.context, f"{network.name} {config.wire_dtype}"
    blobs = exchange(setting.encode(), context.deadline.remaining_s)
    others = [rank for rank, blob in enumerate(blobs) if blob != setting.encode()]
    if others:
        refusal = RendezvousFailure.refused(
            f"this rank would use {setting} between nodes, but {context.names.list(others)} "
            f"{printable(blobs[others[0]].decode(errors='replace'), _MOST_CHARS)}",
            "SDP_INTERNODE, and SDP_WIRE_DTYPE or the argument in its place (wire_dtype, or wire "
            "of local updates), must be equal on all ranks, and mpirun has to start all or none",
            others,
        )
        raise context.error(refusal)


def _rank_info(rendezvous: Rendezvous, name: str, place: Topology | None) -> RankInfo:
    context = rendezvous.context
    return RankInfo(
        token=group_token(announcement.pack() for announcement in rendezvous.table),
        name=name,
        rank=context.rank,
        world_size=context.world_size,
        members=rendezvous.global_ranks,
        job="" if place is None else place.job_key,
        process=process_identity(os.getpid()),
        pid_namespace=namespace("pid"),
        host=rendezvous.table[context.rank].place.host,
        clock=clock_id(),
    )


def _share_memory(
    rendezvous: Rendezvous, members: Sequence[int], info: RankInfo, config: Config
) -> _native.NativeGroup:
    context = rendezvous.context
    index, size = members.index(context.rank), len(members)
    staging = config.staging_nbytes(size)
    prefix = info.names.error_prefix(info.rank)
    with context.raising_errors():
        segment = os.memfd_create(f"sdp-{info.name}"[:200], os.MFD_CLOEXEC)
    try:
        at = _native.initialize_segment(segment, index, size, staging, prefix)
        os.pwrite(segment, info.pack(), at)
        links = rendezvous.connect(segment, members)
    except BaseException:
        os.close(segment)
        raise
    native = _native.NativeGroup(
        index,
        size,
        links.segment_fds,
        links.sockets,
        links.pidfds,
        staging,
        -1 if config.spin_us is None else config.spin_us,
        list(members),
        context.world_size,
        info.token,
        list(info.members or ()),
        config.engine_threads,
    )
    native.set_error_prefix(prefix)
    return native


def _no_network(rank: int, nodes: Nodes) -> RendezvousFailure:
    here = nodes.node_of(rank)
    others = [r for node, ranks in enumerate(nodes.members) if node != here for r in ranks]
    return RendezvousFailure.refused(
        f"{nodes.name(others)} and this rank on {nodes.hosts[here]} share no memory, and there is "
        "no network between them",
        "several nodes need MPI (pip install mpi4py mpich, start with mpirun) or PyTorch; on "
        "one machine run all ranks in one network namespace (containers: one pod, or "
        "--network=host)",
        others,
    )
