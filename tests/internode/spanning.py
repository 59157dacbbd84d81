"""Groups that span nodes, on one machine: ranks say where they run, and gloo joins the nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from sdp_plugins.core import Group
from sdp_plugins.core.internode import algorithm_choice
from sdp_plugins.core.internode.plan import Plan
from sdp_plugins.core.nodes import Nodes, tree
from sdp_plugins.core.rendezvous import announcement
from sdp_plugins.torch.gloo_network import GlooNetwork
from sdp_plugins.torch.store import TorchStore
from tests.ranks import kept

TIMEOUT_S = 60.0

# The node of every rank.
LAYOUTS = {
    "2x1": (0, 1),
    "1+2": (0, 1, 1),
    "3x1": (0, 1, 2),
    "2x2": (0, 0, 1, 1),
    "interleaved": (0, 1, 0, 1),
    "3+1": (0, 0, 0, 1),
    "4x1": (0, 1, 2, 3),
}
# Those of tests that take every plan, and only those.
LAYOUTS_OF_PLANS = {
    "6x1": (0, 1, 2, 3, 4, 5),
    "8x1": (0, 1, 2, 3, 4, 5, 6, 7),
    "4x2": (0, 0, 1, 1, 2, 2, 3, 3),
}


def keep_the_tree(nodes: Nodes) -> bool:
    """Whether sums by node and then over nodes follow the same tree as over all ranks.

    They do if each node has the same power of two of consecutive ranks, and in few other cases.
    """
    return tree([tree(ranks) for ranks in nodes.members]) == tree(range(nodes.world_size))


@contextmanager
def on_node(node: int) -> Iterator[None]:
    """Have this rank announce itself from a node of its own choice."""
    place = announcement.Place("a kernel", node, f"node{node}")
    with mock.patch.object(announcement.Place, "here", return_value=place):
        yield


def meet(
    layout: str, root: str, name: str, timeout_s: float = TIMEOUT_S, wire_dtype: str | None = None
) -> Group:
    """Make a group; `root` is a folder of this group's own."""
    rank, nodes = int(os.environ["RANK"]), (LAYOUTS | LAYOUTS_OF_PLANS)[layout]
    store = dist.FileStore(f"{root}/{name}", len(nodes))
    with on_node(nodes[rank]):
        return Group.from_store(
            TorchStore(store),
            rank,
            len(nodes),
            name=name,
            timeout_s=timeout_s,
            network=GlooNetwork(store),
            wire_dtype=wire_dtype,
        )


def spanning_group(layout: str, root: str) -> Group:
    """A pool's group of this layout: made by the first case that needs it."""
    key = f"spanning {layout}"
    if key not in kept:
        kept[key] = meet(layout, root, layout)
    group: Group = kept[key]
    return group


@contextmanager
def only(plan: Plan) -> Iterator[None]:
    """Have this rank find no other plan."""

    def one(*args: object, **options: object) -> Iterator[Plan]:
        yield plan

    algorithm_choice.choose.cache_clear()
    try:
        with mock.patch.object(algorithm_choice, "candidates", one):
            yield
    finally:
        algorithm_choice.choose.cache_clear()
