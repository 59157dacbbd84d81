"""PyTorch across nodes: nothing changes but the path of the bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch.distributed.fsdp import fully_shard

from sdp_plugins.core.local_updates import updates
from sdp_plugins.core.local_updates.schedule import Schedule
from sdp_plugins.core.nodes import Nodes
from sdp_plugins.lightning.fabric import SMDDPStrategy
from sdp_plugins.torch import Options, OuterStep, ShardedOptimizer
from sdp_plugins.torch.groups import core_group
from sdp_plugins.torch.local_updates import _ModelParameters
from tests.internode.spanning import LAYOUTS, on_node
from tests.ranks import Pool
from tests.torch import (
    direct_nets,
    models,
    test_collectives,
    test_ddp,
    test_direct_gradients,
    test_local_updates,
    test_sharding,
    test_sharding_by_parameter,
    test_sharding_clipping,
    test_sharding_masters,
)
from tests.torch.jobs import process_group


def run_on_nodes(rank: int, world: int, layout: str, case: Callable[..., Any], *args: Any) -> Any:
    """Run one of the tests' cases on nodes of this layout."""
    with on_node(LAYOUTS[layout][rank]):
        return case(rank, world, *args)


@pytest.mark.parametrize("name", test_ddp.CASES)
def test_ddp_like_gloo(rank_pool: Pool, name: str) -> None:
    assert rank_pool(2).run(run_on_nodes, "2x1", test_ddp.run_case, name) == ["hierarchical"] * 2


@pytest.mark.parametrize(
    "case", [test_collectives.run_moves, test_collectives.run_objects, test_ddp.run_two_joins]
)
def test_torch_case(rank_pool: Pool, case: Callable[..., Any]) -> None:
    rank_pool(2).run(run_on_nodes, "2x1", case)


@pytest.mark.parametrize("layout", ["2x2", "3x1", "interleaved"])
def test_point_to_point(rank_pool: Pool, layout: str) -> None:
    """`dist.recv` without a source among others."""
    case = test_collectives.run_point_to_point
    rank_pool(len(LAYOUTS[layout])).run(run_on_nodes, layout, case)


def run_steps(rank: int, world: int, options: dict[str, Any]) -> Any:
    with process_group():
        model = models.wrap(models.Plain, None, **options)
        models.train(model, rank)
        assert models.agree(models.state(model))
        group: Any = dist.group.WORLD
        return group._group.nodes, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}])
def test_all_layouts_train_the_same_weights(rank_pool: Pool, options: dict[str, Any]) -> None:
    """Four ranks on one node, on two and on four: bit by bit."""
    (one, alone), *_ = rank_pool(4).run(run_steps, options)
    assert isinstance(one, Nodes) and one.count == 1
    for layout in ("2x2", "4x1"):
        for nodes, parameters in rank_pool(4).run(run_on_nodes, layout, run_steps, options):
            assert nodes.count == len(set(LAYOUTS[layout]))
            assert all(map(torch.equal, parameters, alone))


def run_groups(rank: int, world: int) -> list[int]:
    """torch's own sub-groups: on one node, across nodes, and one that outlives another."""
    with process_group():
        found = []
        for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [3, 2, 1]):
            group = dist.new_group(ranks)
            if rank in ranks:
                data = torch.full((50_000,), float(rank))
                dist.all_reduce(data, group=group)
                assert (data == sum(ranks)).all()
                found.append(group._group.nodes.count)
        dist.barrier()
        return found


def test_sub_groups(rank_pool: Pool) -> None:
    assert rank_pool(4).run(run_on_nodes, "2x2", run_groups) == [
        [1, 2],
        [1, 2, 2],
        [1, 2, 2],
        [1, 2, 2],
    ]


def is_rounded(group: Any = None) -> bool:
    data = torch.linspace(0, 1, 50_000)
    exact = data * dist.get_world_size(group)
    dist.all_reduce(data, group=group)
    assert (data - exact).abs().max() < 0.1
    return not torch.equal(data, exact)


def run_wires(rank: int, world: int) -> list[bool]:
    """Groups whose wire dtypes differ."""
    with process_group():
        groups = [None, dist.new_group(pg_options=Options("int8")), dist.new_group()]
        with pytest.raises(ValueError, match="wire_dtype='int7' cannot be used"):
            dist.new_group(pg_options=Options("int7"))
        return [is_rounded(group) for group in groups]


def test_wire_dtype_of_a_group(rank_pool: Pool) -> None:
    found = rank_pool(2).run(run_on_nodes, "2x1", run_wires)
    assert found == [[False, True, False]] * 2


@pytest.mark.parametrize("wire", [None, "int8"])
def test_local_updates_between_nodes(rank_pool: Pool, wire: str | None) -> None:
    """Gradients are averaged inside nodes; all ranks hold the same bits after an outer step."""
    case, form = test_local_updates.inside_nodes, {"every": 5, "wire": wire}
    test_local_updates.check_inside_nodes(rank_pool(4).run(run_on_nodes, "2x2", case, form))


def test_exchanges_between_nodes_do_not_interrupt_the_training(rank_pool: Pool) -> None:
    case = test_local_updates.run_background
    for found in rank_pool(2).run(run_on_nodes, "2x1", case):
        assert len(found) > 1 and set(found) == {os.SCHED_BATCH}


def run_options(rank: int, world: int) -> None:
    with process_group():
        options = Options("int8 feedback")
        group: Any = core_group(dist.new_group(backend="smddp", pg_options=options))
        parameters = _ModelParameters(torch.nn.Linear(2, 2), 1)
        with pytest.raises(ValueError, match=r"'int8 feedback' cannot be used.*'int8', w"):
            updates.LocalUpdates(group, parameters, Schedule(3), OuterStep())


def test_local_updates_refuse_a_group_that_keeps_residuals(rank_pool: Pool) -> None:
    rank_pool(2).run(run_on_nodes, "2x1", run_options)


def run_feedback_with_fsdp(rank: int, world: int) -> None:
    """FSDP's buffers are temporary: one layer would get what rounding has left of another."""
    with process_group(pg_options=Options("int8 feedback")):
        model = fully_shard(torch.nn.Linear(200, 200))
        with pytest.raises(ValueError, match=r"Hint: with FSDP, use 'int8' or 'int8 stochastic'"):
            model(torch.ones(3, 200)).sum().backward()


def test_feedback_is_refused_where_buffers_are_temporary(rank_pool: Pool) -> None:
    rank_pool(2).run(run_on_nodes, "2x1", run_feedback_with_fsdp)


def test_local_updates_resumed_exactly(rank_pool: Pool, tmp_path: Path) -> None:
    form = {"every": 6, "fragments": 3, "delay": 2, "wire": "int8"}
    case, folder = test_local_updates.run_resumed, str(tmp_path)
    assert rank_pool(2).run(run_on_nodes, "2x1", case, form, folder, 11) == [True, True]


def run_strategy(rank: int, world: int, **options: Any) -> bool:
    strategy = SMDDPStrategy(
        cluster_environment=TorchElasticEnvironment(),
        parallel_devices=[torch.device("cpu")] * world,
        accelerator=CPUAccelerator(),
        **options,
    )
    strategy._configure_launcher()
    strategy.setup_environment()
    try:
        return is_rounded()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wire", ["int8", None])
def test_wire_dtype_of_a_strategy(rank_pool: Pool, wire: str | None) -> None:
    found = rank_pool(2).run(run_on_nodes, "2x1", partial(run_strategy, wire_dtype=wire))
    assert found == [wire == "int8"] * 2


@pytest.mark.parametrize("layout", ["2x2", "1+2", pytest.param("2x1", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "case",
    [
        test_sharding.like_one_process,
        test_sharding_clipping.scale,
        pytest.param(test_sharding_clipping.clip, marks=pytest.mark.long),
        pytest.param(test_sharding.skip, marks=pytest.mark.long),
    ],
)
def test_sharded_optimizer(rank_pool: Pool, layout: str, case: Callable[..., Any]) -> None:
    rank_pool(len(LAYOUTS[layout])).run(run_on_nodes, layout, case)


def test_a_sharded_checkpoint(rank_pool: Pool, tmp_path: Any) -> None:
    path = str(tmp_path / "checkpoint")
    rank_pool(4).run(run_on_nodes, "2x2", test_sharding.save, path)
    rank_pool(4).run(test_sharding.load, path, 4)
    rank_pool(2).run(run_on_nodes, "2x1", test_sharding.load, path, 4)


@pytest.mark.parametrize("layout", ["2x2", pytest.param("1+2", marks=pytest.mark.long)])
def test_sharded_by_parameter(rank_pool: Pool, layout: str) -> None:
    world = len(LAYOUTS[layout])
    rank_pool(world).run(run_on_nodes, layout, test_sharding_by_parameter.more_ranks)


def test_master_weights(rank_pool: Pool) -> None:
    kind = torch.optim.Adafactor, {"lr": 1e-4}
    case = test_sharding_masters.like_by_hand
    rank_pool(2).run(run_on_nodes, "2x1", case, torch.bfloat16, *kind)


def test_conjugated_gradients(rank_pool: Pool) -> None:
    rank_pool(2).run(run_on_nodes, "2x1", test_sharding.conjugate)


@pytest.mark.parametrize("how", [None, direct_nets.checkpointed])
def test_gradients_that_layers_write(rank_pool: Pool, how: Any) -> None:
    rank_pool(2).run(run_on_nodes, "2x1", test_direct_gradients.like_ddp, how, (2, 5))


def test_second_gradients(rank_pool: Pool) -> None:
    rank_pool(2).run(run_on_nodes, "2x1", test_sharding.refuse_second_gradients)


def run_two_optimizers(rank: int, world: int) -> None:
    """Two models' backward passes, in another order on each rank: buckets are not exchanged."""
    with process_group():
        torch.manual_seed(0)
        models = [torch.nn.Linear(4, 4) for _ in range(2)]
        optimizers = [ShardedOptimizer(model, torch.optim.SGD, lr=1.0) for model in models]
        before = [model.bias.clone() for model in models]
        for index in (0, 1) if rank == 0 else (1, 0):
            (models[index](torch.ones(4)).sum() * (10 * index + 1)).backward()
        for model, optimizer, old, change in zip(models, optimizers, before, (1, 11), strict=True):
            optimizer.step()
            torch.testing.assert_close(model.bias, old - change)


def test_sharded_optimizers_are_apart(rank_pool: Pool) -> None:
    rank_pool(2).run(run_on_nodes, "2x1", run_two_optimizers)
