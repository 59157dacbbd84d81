"""Where ranks are, and what follows from it: arithmetic, without ranks."""

from __future__ import annotations

import itertools

import pytest

from sdp_plugins.core.internode.broadcast import route
from sdp_plugins.core.internode.plan import ALIGN_ELEMS, shard
from sdp_plugins.core.nodes import Nodes
from tests.internode.spanning import keep_the_tree


def of(*nodes: int) -> Nodes:
    return Nodes.of_places(nodes, [f"node{node}" for node in nodes])


def test_ranks_are_put_by_node() -> None:
    nodes = of(5, 2, 5, 2, 2)
    assert nodes.members == ((0, 2), (1, 3, 4))
    assert nodes.hosts == ("node5", "node2")
    assert (nodes.count, nodes.world_size, nodes.rails) == (2, 5, 2)
    assert [(nodes.node_of(r), nodes.index_of(r)) for r in range(5)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
        (1, 2),
    ]
    assert [nodes.counterpart(r, 0) for r in range(5)] == [0, 0, 2, 2, 0]
    assert nodes.name([4, 0, 3]) == "rank 0 on node5, ranks 3, 4 on node2"


@pytest.mark.parametrize(
    ("nodes", "keep"),
    [
        ((0, 0, 0), True),  # one node
        ((0, 1, 2), True),
        ((0, 0, 1, 1), True),
        ((0, 0, 1, 1, 2, 2), True),
        ((0, 0, 0, 0, 1, 1, 1, 1), True),
        ((0, 0, 0, 1, 1, 1), False),  # no power of two
        ((0, 1, 0, 1), False),
        ((0, 0, 0, 1), False),
        ((0, 0, 1), True),
        ((0, 1, 1), False),
    ],
)
def test_which_layouts_keep_the_tree(nodes: tuple[int, ...], keep: bool) -> None:
    assert keep_the_tree(of(*nodes)) is keep


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("total", [0, 1, 31, 32, 33, 1000, 4096, 100_003])
def test_shards_cover_everything_once(total: int, parts: int) -> None:
    shards = [shard(total, parts, index) for index in range(parts)]
    assert sum(count for _, count in shards) == total
    at = 0
    for begin, count in shards:
        assert begin == at
        at += count
    longest = max(count for _, count in shards)
    assert longest - total / parts < ALIGN_ELEMS + 1  # balanced


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 11, 64])
def test_a_broadcast_reaches_every_node_once(nodes: int, chain: bool) -> None:
    for root in {0, nodes // 2, nodes - 1}:
        routes = [route(node, root, nodes, chain=chain) for node in range(nodes)]
        assert routes[root].parent is None
        edges = {(node, child) for node in range(nodes) for child in routes[node].children}
        assert edges == {(r.parent, node) for node, r in enumerate(routes) if r.parent is not None}
        reached, hops = {root}, 0
        while len(reached) < nodes:
            reached |= set(itertools.chain(*(routes[node].children for node in reached)))
            hops += 1
        assert hops == (nodes - 1 if chain else max(depth(routes, node) for node in range(nodes)))
        if not chain:
            assert hops <= (nodes - 1).bit_length()


def depth(routes: list[object], node: int) -> int:
    parent = routes[node].parent  # type: ignore[attr-defined]
    return 0 if parent is None else 1 + depth(routes, parent)
