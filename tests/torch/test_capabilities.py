"""The table of what runs is true: every line of it, and nothing beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torch.capability_table import (
    CALLS,
    REDUCING,
    REDUCTIONS,
    capabilities,
    movable,
    tables,
)
from tests.torch.jobs import process_group

DOCS = Path(__file__).parents[2] / "docs" / "torch.md"
NBYTES = {"small": 64, "large": 1 << 17}
RUNNING = {(line.operation, line.dtype, line.reduce_op): line for line in capabilities()}


def run(call: str, tensor: torch.Tensor, op: Any) -> None:
    """One operation on two ranks; each shows as many bytes as the tensor has."""
    halves = list(tensor.chunk(2))
    both = [torch.empty_like(tensor) for _ in range(2)]
    rank = dist.get_rank()
    match call:
        case "all_reduce":
            dist.all_reduce(tensor, op)
        case "sparse_all_reduce":
            index = torch.arange(len(tensor))[None]
            size = tensor.shape
            sparse = torch.sparse_coo_tensor(index, tensor, size, check_invariants=True)
            dist.all_reduce(sparse, op)
        case "reduce":
            dist.reduce(tensor, 0, op)
        case "reduce_scatter":
            dist.reduce_scatter(halves[0].clone(), halves, op)
        case "broadcast":
            dist.broadcast(tensor, 0)
        case "all_gather":
            dist.all_gather(both, tensor)
        case "gather":
            dist.gather(tensor, both if rank == 0 else None)
        case "scatter":
            dist.scatter(halves[0].clone(), halves if rank == 0 else None)
        case "all_to_all":
            dist.all_to_all_single(both[0], tensor)
        case "barrier":
            dist.barrier()
        case "send" | "recv":
            dist.send(tensor, 1) if rank == 0 else dist.recv(both[0], 0)


def reduce_op(name: str | None) -> Any:
    if name == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(2.0)
    return getattr(dist.ReduceOp, name or "SUM")


def refuse(operation: str, tensor: torch.Tensor, name: str | None) -> None:
    try:
        run(operation, tensor, reduce_op(name))
    except (TypeError, ValueError):
        return
    pytest.fail(f"{operation} of {tensor.dtype} with {name} runs")


def run_all(rank: int, world: int) -> None:
    with process_group() as group:
        for operation in CALLS:
            for dtype in movable() if operation != "barrier" else [None]:
                for name in REDUCTIONS if operation in REDUCING else [None]:
                    for size, nbytes in NBYTES.items():
                        tensor = torch.zeros(nbytes, dtype=torch.uint8).view(dtype or torch.uint8)
                        # torch 2.15 has bcomplex32, two bfloat16, beside complex32
                        alike = torch.complex32 if str(dtype) == "torch.bcomplex32" else dtype
                        line = RUNNING.get((operation, alike, name))
                        if line is None:
                            refuse(operation, tensor, name)
                            continue
                        run(operation, tensor, reduce_op(name))
                        path = getattr(line, size)
                        assert path in ("ring", group.last_path), (line, size)


def test_the_table_is_what_runs(rank_pool: Any) -> None:
    assert len(RUNNING) == len(capabilities())
    rank_pool(2).run(run_all)


def test_docs_show_the_tables() -> None:
    assert "\n".join(tables()) in DOCS.read_text()
