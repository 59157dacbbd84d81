"""Plans, without a network: every number of nodes, every factoring, every node."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from benchmarks.predict.costs import described
from sdp_plugins.core.internode.algorithm_choice import (
    MOST_MULTIPLIED_NBYTES,
    SEGMENTS,
    candidates,
    choose,
)
from sdp_plugins.core.internode.cost_model import Costs
from sdp_plugins.core.internode.plan import (
    Algorithm,
    Level,
    Plan,
    factorings,
    levels,
    segments,
    split,
)
from sdp_plugins.core.nodes import tree

NODES = [*range(2, 34), 48, 64, 96, 100, 128]


def plans(algorithm: Algorithm) -> Iterator[Plan]:
    for nodes in NODES:
        for radices in factorings(nodes):
            yield Plan(algorithm, radices, 2**20)


def everyone(plan: Plan, count: int) -> list[tuple[Level, ...]]:
    return [levels(plan, node, count) for node in range(plan.nodes)]


@pytest.mark.parametrize("nodes", [2, 3, 4, 6, 8, 12, 16, 1000, 1024, 4096])
def test_factorings_are_the_direct_one_and_powers_of_two(nodes: int) -> None:
    found = factorings(nodes)
    assert found[0] == (nodes,)
    assert len(set(found)) == len(found)
    for radices in found:
        assert Plan(Algorithm.recursive_multiplying, radices).nodes == nodes
        assert all(radix in (2, 4, 8, 16) for radix in radices[:-1])
        assert radices[-1] > 1
    if nodes & (nodes - 1) == 0 and nodes > 2:
        assert (2,) * (nodes.bit_length() - 1) in found


def test_members_of_a_level_agree_who_they_are() -> None:
    for plan in (*plans(Algorithm.sharded), *plans(Algorithm.recursive_multiplying)):
        all_levels = everyone(plan, 1000)
        for node, own in enumerate(all_levels):
            assert len(own) == len(plan.radices)
            for depth, level in enumerate(own):
                assert level.members[level.digit] == node
                assert sorted((*level.others, level.digit)) == list(range(plan.radices[depth]))
                for digit, member in enumerate(level.members):
                    theirs = all_levels[member][depth]
                    assert (theirs.members, theirs.digit) == (level.members, digit)
                    assert (theirs.begin, theirs.count) == (level.begin, level.count)


def test_exchanges_follow_the_tree_and_serve_everything_once() -> None:
    """Nodes add symbols instead of numbers, as the executor adds numbers."""
    for plan in plans(Algorithm.sharded):
        count = 2 * plan.nodes + 3
        all_levels = everyone(plan, count)
        # Per node: which nodes' sum, in which order, it holds of each element.
        held = [dict.fromkeys(range(count), tree([node])) for node in range(plan.nodes)]
        for depth in range(len(plan.radices)):
            before = held
            held = []
            for own in all_levels:
                level = own[depth]
                begin, n = level.part(level.digit)
                held.append(
                    {
                        element: tree([before[member][element] for member in level.members])
                        for element in range(begin, begin + n)
                    }
                )
        served = sorted(itertools.chain.from_iterable(held))
        assert served == list(range(count)), plan
        expected = tree(range(plan.nodes))
        assert all(total == expected for part in held for total in part.values()), plan
        # And back: each level gives its members what they all held before it.
        for depth in reversed(range(len(plan.radices))):
            held = [
                {k: v for member in own[depth].members for k, v in held[member].items()}
                for own in all_levels
            ]
            for own, elements in zip(all_levels, held, strict=True):
                level = own[depth]
                assert sorted(elements) == list(range(level.begin, level.begin + level.count))
        assert all(len(elements) == count for elements in held)


def test_swaps_follow_the_tree() -> None:
    for plan in plans(Algorithm.recursive_multiplying):
        held: list[object] = list(range(plan.nodes))
        all_levels = everyone(plan, 10)
        for depth in range(len(plan.radices)):
            assert all((own[depth].begin, own[depth].count) == (0, 10) for own in all_levels)
            held = [tree([held[member] for member in own[depth].members]) for own in all_levels]
        assert held == [tree(range(plan.nodes))] * plan.nodes


def test_nodes_send_equally_much_and_what_the_plan_says() -> None:
    for plan in plans(Algorithm.sharded):
        count = 1_000_003
        sent = []
        for own in everyone(plan, count):
            there = [level.part(digit)[1] for level in own for digit in level.others]
            back = [len(level.others) * level.part(level.digit)[1] for level in own]
            sent.append(sum(there) + sum(back))
        steps = plan.messages
        assert max(sent) - min(sent) <= steps, plan
        assert all(abs(elements - plan.sent(count)) <= steps for elements in sent), plan


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
def test_shares_cover_and_differ_by_one(parts: int) -> None:
    for total in (0, 1, parts - 1, parts, 3 * parts + 2, 1000):
        shares = [split(total, parts, index) for index in range(parts)]
        assert [begin for begin, _ in shares] == list(
            itertools.accumulate((n for _, n in shares[:-1]), initial=0)
        )
        assert sum(n for _, n in shares) == total
        assert max(n for _, n in shares) - min(n for _, n in shares) <= 1


def test_segments_cover() -> None:
    plan = Plan(Algorithm.sharded, (2,), 1024)
    assert segments(plan, 1000, 4) == [(0, 256), (256, 256), (512, 256), (768, 232)]
    assert segments(plan, 3, 2048) == [(0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("nodes", [2, 3, 4, 8, 24, 1024])
@pytest.mark.parametrize("nbytes", [4, 4096, 10**5, 10**7, 10**9])
def test_the_choice_is_the_least_and_keeps_to_what_is_asked(nodes: int, nbytes: int) -> None:
    for latency_s, message_s, byte_s in itertools.product(
        (1e-6, 1e-3), (1e-7, 1e-4), (1e-11, 1e-8)
    ):
        costs = Costs(latency_s, message_s, 2 * message_s, byte_s, 1e-10)
        best = costs.seconds(choose(costs, nodes, nbytes), nbytes)
        allowed = Algorithm.sharded if nbytes > MOST_MULTIPLIED_NBYTES else None
        least = min(costs.seconds(plan, nbytes) for plan in candidates(nodes, allowed))
        assert best == least
        for algorithm in Algorithm:
            plan = choose(costs, nodes, nbytes, algorithm=algorithm, direct=True)
            assert (plan.algorithm, plan.radices) == (algorithm, (nodes,))


def test_choices_that_anyone_would_make() -> None:
    fast_posts = Costs(latency_s=1e-3, message_s=1e-7, byte_s=1e-8, post_s=1e-7, node_byte_s=1e-10)
    slow_posts = Costs(latency_s=1e-6, message_s=1e-3, byte_s=1e-9, post_s=1e-3, node_byte_s=1e-10)
    assert choose(fast_posts, 8, 64).algorithm is Algorithm.recursive_multiplying
    assert choose(fast_posts, 8, 64).radices == (8,)
    assert choose(fast_posts, 8, 10**8).algorithm is Algorithm.sharded
    assert choose(fast_posts, 8, 10**8).radices == (8,)
    assert choose(slow_posts, 1024, 64).radices == (2,) * 10
    assert choose(slow_posts, 1024, 10**9).radices == (2,) * 10
    assert choose(fast_posts, 8, 10**8).segment_nbytes in SEGMENTS


def test_an_exchange_takes_what_the_wire_takes_where_that_is_slow() -> None:
    costs = Costs(latency_s=1e-5, message_s=1e-6, byte_s=1e-8, post_s=1e-7, node_byte_s=1e-10)
    nbytes = 100 * 2**20
    for nodes in (2, 4, 64):
        plan = choose(costs, nodes, nbytes)
        limit = plan.sent(nbytes) * costs.byte_s
        assert limit < costs.seconds(plan, nbytes) < 1.05 * limit


def test_plans_and_costs_can_be_read() -> None:
    assert str(Plan(Algorithm.sharded, (2, 4), 2**21)) == (
        "reduce-scatter and all-gather, 2 x 4, in segments of 2 MiB: 4 hops"
    )
    assert "8: 1 hop" in str(Plan(Algorithm.recursive_multiplying, (8,)))
    assert "0.80 Gbit/s" in described(Costs(byte_s=1e-8))
