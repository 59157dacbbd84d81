"""The cores of each rank on a machine with several NUMA nodes.

Memory is fastest for the cores of the node in which it lies, and Linux puts a page into the node of
the core that writes it first. Ranks that stay on one node so have their gradients, their part of
shared weights and their staging areas there.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from sdp_plugins.core.config import binds_ranks

NODES = Path("/sys/devices/system/node")


def cores_of_ranks(ranks: int, environment: Mapping[str, str]) -> list[set[int]]:
    """The cores of each of this machine's ranks, in rank order.

    A rank gets the cores of one node, which neighbours may share, or of several nodes. All ranks
    get all cores that this process may use where there is one node, where nodes or ranks cannot be
    divided so that all have equally many cores, or where ``SDP_NUMA=0``.
    """
    allowed = os.sched_getaffinity(0)
    shares = shares_of_nodes(ranks, nodes_of(NODES), allowed) if binds_ranks(environment) else []
    return shares or [allowed] * ranks


def shares_of_nodes(
    ranks: int, nodes: Iterable[set[int]], allowed: AbstractSet[int]
) -> list[set[int]]:
    """The allowed cores of one or more nodes for each rank; empty if ranks cannot share evenly."""
    usable = [shared for cores in nodes if (shared := cores & allowed)]
    if allowed - set().union(*usable) or not _divide_evenly(usable, ranks):
        return []
    if ranks >= len(usable):
        return [usable[rank * len(usable) // ranks] for rank in range(ranks)]
    each = len(usable) // ranks
    return [set().union(*usable[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def _divide_evenly(nodes: Collection[Collection[int]], ranks: int) -> bool:
    sizes = {len(cores) for cores in nodes}
    return len(sizes) == 1 and (ranks % len(nodes) == 0 or len(nodes) % ranks == 0)


def nodes_of(folder: Path) -> list[set[int]]:
    """The cores of each NUMA node, as the kernel lists them; empty if it does not."""
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    try:
        return [cores_in(path.read_text().strip()) for path in lists]
    except ValueError:
        return []


def cores_in(text: str) -> set[int]:
    """What a list such as ``0-3,8`` names."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
