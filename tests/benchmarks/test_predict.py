"""The simulation of training on many nodes: against closed forms, and segment by segment."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.nodes import Layout, wire_limit_s
from benchmarks.predict.baselines import Ring, Servers
from benchmarks.predict.costs import ASSUMED, with_options
from benchmarks.predict.exchange import Exchange, agreement_s, groups, meet, split_seconds
from benchmarks.predict.gradients import MODELS, Release, buckets, one_by_one, releases, sizes_of
from benchmarks.predict.simulation import Setting, compute_times, mean_step_s, run, scales, step
from benchmarks.predict.table import brief
from sdp_plugins.core.internode.algorithm_choice import candidates, choose
from sdp_plugins.core.internode.cost_model import Costs
from sdp_plugins.core.internode.plan import Algorithm, Plan, factorings, levels, segments

MIB = 2**20


def fast(gbit: float = 100) -> Costs:
    """Costs of a network and nodes that take little."""
    return with_options(gbit, latency_us=20, message_us=20, node_gbs=20)


FAST = fast()
CALM = Setting("resnet50", compute_s=0.05, jitter=0.0, steps=1)


def fused(model):
    sizes = sizes_of(model)
    return releases(sizes, buckets(sizes))


# ---- models and buckets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("bert-large", 336_226_108), ("gpt2-xl", 1_557_611_200), ("resnet50", 25_557_032)],
)
def test_models_have_as_many_parameters_as_their_originals(model, parameters):
    assert sum(MODELS[model]()) == parameters


@pytest.mark.parametrize("model", ["small", *MODELS])
def test_buckets_are_those_of_ddp(model):
    torch = pytest.importorskip("torch")
    if model == "small":
        from benchmarks import bert

        tensors = [p.detach() for p in bert.build(0).parameters()]
        sizes = [tensor.nbytes for tensor in tensors]
    else:
        tensors = [torch.empty(elements, device="meta") for elements in MODELS[model]()]
        sizes = sizes_of(model)
    order = list(reversed(range(len(tensors))))
    # As the reducer does after the first step, in the order of the backward pass.
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size(
        tensors[::-1], [torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, 25 * MIB], [], order
    )
    assert len(theirs) > 2
    assert buckets(sizes) == theirs


def test_releases_cover_everything_and_end_with_the_computing():
    for model in MODELS:
        found = fused(model)
        assert sum(release.nbytes for release in found) == sum(sizes_of(model))
        shares = [release.share for release in found]
        assert shares == sorted(shares)
        assert 1 / 3 < shares[0] < 1 / 2
        assert shares[-1] == 1


# ---- our all_reduce --------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 3, 12, 16, 48])
def test_groups_are_those_of_the_levels(nodes):
    times = np.random.default_rng(nodes).random(nodes)
    for radices in factorings(nodes):
        plan = Plan(Algorithm.sharded, radices, MIB)
        for depth, members in enumerate(groups(plan)):
            assert sorted(members.flatten()) == list(range(nodes))
            met = meet(times, members)
            for node in range(nodes):
                own = levels(plan, node, 1)[depth].members
                assert met[node] == times[list(own)].max()


@pytest.mark.parametrize("nodes", [2, 6, 16, 1000])
@pytest.mark.parametrize("nbytes", [4, MIB, 25 * MIB, 100 * MIB + 12])
def test_one_bucket_takes_what_the_costs_say(nodes, nbytes):
    for costs in (Costs(), FAST):
        exchange = Exchange(costs, nodes)
        done = exchange.all_reduce(np.zeros(nodes), nbytes)
        expected_s = costs.seconds(exchange.plan(nbytes), nbytes) + agreement_s(costs, nodes)
        np.testing.assert_allclose(done, expected_s, rtol=1e-9)


def by_depth(nodes, *, deepest):
    radices = sorted(factorings(nodes), key=len)
    return Plan(Algorithm.sharded, radices[-1 if deepest else 0], MIB // 4)


@pytest.mark.parametrize("nodes", [2, 4, 6, 12, 16])
@pytest.mark.parametrize("deepest", [(0, 0, 0), (1, 1, 1), (0, 1, 0), (1, 0, 1)])
def test_the_shortcut_agrees_with_every_segment(monkeypatch, nodes, deepest):
    """Three buckets by plans of few or many hops; nodes that are late by up to many segments."""
    rng = np.random.default_rng(nodes)
    sizes = (3 * MIB, 5 * MIB + 4, 100_000)
    plans = {n: by_depth(nodes, deepest=deep) for n, deep in zip(sizes, deepest, strict=True)}
    monkeypatch.setattr(Exchange, "plan", lambda self, nbytes: plans[nbytes])
    for lateness_s in (0.0, 1e-3, 0.1):
        exchange, every = Exchange(Costs(), nodes), EverySegment(Costs(), nodes)
        ready = np.zeros(nodes)
        for nbytes, plan in plans.items():
            ready = ready + lateness_s * rng.random(nodes)
            expected = every.all_reduce(plan, ready, nbytes)
            np.testing.assert_allclose(exchange.all_reduce(ready, nbytes), expected, rtol=1e-9)


class EverySegment:
    """Takes buckets through the nodes segment by segment, node by node."""

    def __init__(self, costs, nodes):
        self._costs, self._nodes = costs, nodes
        self._done = [0.0] * nodes

    def all_reduce(self, plan, ready, nbytes):
        _, hop_s = split_seconds(self._costs, plan, nbytes)
        whole, depth = min(plan.segment_nbytes, nbytes), len(plan.radices)
        before = [self._done] * (plan.hops + 1)
        for _, length in segments(plan, nbytes, 1):
            stage_s = self._costs.stage_s(plan, whole) * length / whole
            now = [[0.0] * self._nodes for _ in before]
            for node in range(self._nodes):
                called = max(ready[node], self._done[node])
                agreed = called + agreement_s(self._costs, self._nodes)
                now[0][node] = max(agreed, before[0][node]) + stage_s
            for hop in range(1, len(now)):
                level = hop - 1 if hop <= depth else 2 * depth - hop
                for node in range(self._nodes):
                    members = levels(plan, node, length)[level].members
                    sent = max(now[hop - 1][member] for member in members)
                    now[hop][node] = max(sent + hop_s, before[hop][node] + stage_s)
            before = now
        self._done = before[-1]
        return self._done


def test_a_bucket_waits_for_the_one_ahead():
    nodes = 8
    exchange = Exchange(FAST, nodes)
    assert exchange.plan(64).algorithm is Algorithm.recursive_multiplying
    exchange_s = FAST.seconds(exchange.plan(25 * MIB), 25 * MIB)
    swap_s = FAST.seconds(exchange.plan(64), 64)
    expected_s = 0.0
    for nbytes, seconds in ((25 * MIB, exchange_s), (64, swap_s), (25 * MIB, exchange_s)):
        expected_s += agreement_s(FAST, nodes) + seconds
        done = exchange.all_reduce(np.zeros(nodes), nbytes)
        np.testing.assert_allclose(done, expected_s, rtol=1e-9)


def test_everyone_waits_for_the_slowest():
    nodes = 64
    ready = np.zeros(nodes)
    ready[37] = 5.0
    for method in (Exchange(FAST, nodes), Ring(FAST, nodes, 8), Servers(FAST, nodes)):
        assert method.all_reduce(ready, 25 * MIB).min() > 5


# ---- steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 8, 64])
@pytest.mark.parametrize("model", MODELS)
def test_a_slow_link_without_stragglers_takes_its_bytes(model, nodes):
    """The wire is idle only while a bucket's first and last segments are on their way."""
    slow = fast(0.5)
    found, setting = fused(model), replace(CALM, model=model)
    sent = sum(choose(slow, nodes, release.nbytes).sent(release.nbytes) for release in found)
    expected_s = found[0].share * setting.compute_s + sent * slow.byte_s
    measured_s = mean_step_s(lambda: Exchange(slow, nodes), found, setting, nodes)
    assert expected_s < measured_s < 1.2 * expected_s


@pytest.mark.parametrize("gbit", [0.1, 10, 1000])
@pytest.mark.parametrize("nodes", [2, 5, 64, 1000])
def test_nothing_is_faster_than_the_wire_or_the_computing(gbit, nodes):
    setting = replace(CALM, jitter=0.1, steps=2)
    row = run(setting, fast(gbit), nodes)
    wire_s = wire_limit_s(Layout(nodes, 8), sum(sizes_of("resnet50")), gbit)
    slowest_s = np.mean([compute_times(setting, nodes, number).min() for number in range(2)])
    for step_s in (row.ours_s, row.ring_s, row.servers_s):
        assert step_s >= wire_s
        assert step_s >= slowest_s >= setting.compute_s


def test_more_bandwidth_never_makes_a_step_longer():
    rows = [run(replace(CALM, jitter=0.05), fast(0.5 * 2**doubled), 256) for doubled in range(10)]
    for slower, faster in itertools.pairwise(rows):
        assert faster.ours_s <= slower.ours_s
        assert faster.ring_s <= slower.ring_s
        assert faster.servers_s <= slower.servers_s


def test_hops_decide_at_a_thousand_nodes():
    """Even where the ring's hops inside of a node cost nothing."""
    row = run(replace(CALM, local_s=0.0), FAST, 1024)
    assert row.ring_s > 2 * row.ours_s
    assert row.servers_s > 2 * row.ours_s
    assert len(row.plan.radices) > 1


def test_a_network_that_takes_no_time_leaves_the_computing_alone():
    nothing = Costs(*[1e-15] * 5)
    for time_s in (run(CALM, nothing, 64).ours_s, run(CALM, nothing, 64).ring_s):
        assert time_s == pytest.approx(CALM.compute_s, rel=1e-3)


def test_the_slowest_of_many_is_later_with_the_logarithm():
    """What a network that takes no time leaves is the mean of the longest delays."""
    setting, nodes = Setting(jitter=0.1, compute_s=1.0, steps=400), 100
    nothing = Costs(*[1e-15] * 5)
    mean_s = mean_step_s(lambda: Exchange(nothing, nodes), [Release(4, 1.0)], setting, nodes)
    harmonic = sum(1 / number for number in range(1, nodes + 1))
    assert mean_s == pytest.approx(1 + 0.1 * harmonic, rel=0.02)


def test_a_seed_gives_the_same_step_and_another_one_a_different_one():
    setting = replace(CALM, jitter=0.1, steps=2)
    assert run(setting, FAST, 16) == run(setting, FAST, 16)
    assert run(setting, FAST, 16) != run(replace(setting, seed=1), FAST, 16)
    few, many = compute_times(setting, 16, 0), compute_times(setting, 64, 0)
    assert (few == many[:16]).all()


def test_a_step_begins_where_the_last_one_ended():
    begun = np.array([1.0, 3.0])
    compute_s = np.array([0.5, 0.5])
    done = step(Exchange(FAST, 2), [Release(4, 1.0)], begun, compute_s)
    assert (done > 3.5).all()
    assert (done < 3.6).all()


def test_curves_double_up_to_the_most():
    assert scales(16) == [2, 4, 8, 16]
    assert scales(2) == [2]
    assert scales(100) == [2, 4, 8, 16, 32, 64, 100]


# ---- rivals ----------------------------------------------------------------------------------


def test_a_ring_has_two_hops_per_further_rank():
    costs = Costs(latency_s=1.0, byte_s=0.25)
    assert Ring(costs, 2, 2).seconds(8) == pytest.approx(2 * 3 * 1.0 + 2 * 8 * 3 / 4 * 0.25)
    # Half of four links connect nodes.
    assert Ring(costs, 2, 2, local_s=0.0).seconds(8) == pytest.approx(3 + 3)
    assert Ring(costs, 4, 1, local_s=0.0).seconds(8) == Ring(costs, 4, 1).seconds(8)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("nodes", [2, 16, 256])
def test_whole_tensors_leave_servers_out_of_balance(model, nodes):
    assert run(replace(CALM, model=model), FAST, nodes).imbalance > 1


def test_servers_in_balance_move_what_a_balanced_exchange_does():
    nodes, nbytes = 4, MIB
    costs = Costs(latency_s=1e-12)
    servers = Servers(costs, nodes)
    for _ in range(nodes):
        done = servers.all_reduce(np.zeros(nodes), nbytes)
    assert servers.imbalance == 1
    wire_s = Plan(Algorithm.sharded, (nodes,), MIB).sent(nodes * nbytes) * costs.byte_s
    assert done.max() == pytest.approx(wire_s)
    servers.all_reduce(np.zeros(nodes), nbytes)
    assert servers.imbalance == pytest.approx(2 / (5 / 4))


def test_tensors_alone_come_in_the_order_of_the_backward_pass():
    assert one_by_one([5, 6, 7]) == [[2], [1], [0]]
    assert buckets([5, 6, 7], 7, 9) == [[2], [1, 0]]
    assert buckets([5, 6, 7], 1, 100) == [[2], [1, 0]]
    assert buckets([5], 1) == [[0]]


# ---- the command -----------------------------------------------------------------------------


def test_options_replace_what_is_assumed():
    costs = with_options(gbit=80, latency_us=7, message_us=3, node_gbs=4)
    assert asdict(costs) == pytest.approx(
        {"latency_s": 7e-6, "post_s": 3e-6, "message_s": 3e-6, "byte_s": 1e-10}
        | {"node_byte_s": 2.5e-10}
    )
    assert with_options() == ASSUMED


def test_plans_are_named_briefly():
    assert brief(Plan(Algorithm.sharded, (4, 4, 4, 2), 2 * MIB)) == "sharded 4^3 x 2, 2 MiB"
    assert brief(Plan(Algorithm.recursive_multiplying, (3,))) == "multiplying 3"
    longest = max((brief(plan) for plan in candidates(4096)), key=len)
    assert len(longest) < 30
    assert len({brief(plan) for plan in candidates(4096)}) == len(list(candidates(4096)))


@pytest.mark.may_leak("fds", reason="matplotlib keeps its font files open")
def test_the_command_writes_everything(tmp_path):
    document = tmp_path / "doc.md"
    document.write_text("<!-- predict begin -->\n<!-- predict end -->\n")
    arguments = (
        *("predict", "--nodes", 12, "--model", "resnet50", "--gbit", 50, "--steps", 1),
        *("--latency-us", 7, "--local-us", 1),
        *("--json", tmp_path / "r.json", "--plot", tmp_path / "r.png", "--markdown", document),
    )
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert "simulated training of resnet50" in result.output
    data = json.loads((tmp_path / "r.json").read_text())
    assert [row["nodes"] for row in data["rows"]] == [2, 4, 8, 12]
    assert data["costs"]["byte_s"] == pytest.approx(8e-9 / 50)
    assert data["costs"]["latency_s"] == pytest.approx(7e-6)
    assert data["setting"]["local_s"] == pytest.approx(1e-6)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert document.read_text().count("| sharded ") == 4


def test_misuse_is_explained():
    result = CliRunner().invoke(app, ["predict", "--model", "x"], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert "unknown model" in result.output
