"""All private names of torch that this plug-in uses; no other module may use any.

torch.distributed has no public interface for a backend in Python, nor for moving a storage's bytes.
These names exist, with the same meaning, in all versions of torch that ``pyproject.toml`` allows.
Importing this module checks them, and every process group imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad, graph
from torch.utils import _python_dispatch as python_dispatch

from sdp_plugins.core.private_names import check_names

__all__ = [
    "TAKES_BACKENDS",
    "FakeTensor",
    "c10d",
    "check",
    "count_modes",
    "current_backward_pass",
    "hook_of",
    "is_transforming",
    "profiling",
    "python_dispatch",
    "run_backward_code",
    "storage_users",
    "unscale_gradients",
    "will_run",
]

NAMES = {
    "_C._are_functorch_transforms_active": "tells whether a function of functions runs",
    "_C._autograd._profiler_enabled": "tells whether this thread is profiled",
    "_C._current_graph_task_id": "tells whether a backward pass runs in this thread",
    "_C._distributed_c10d.Backend.Options": "is what a group says of its time-out",
    "_C._distributed_c10d._DistributedBackendOptions": "is what torch makes a group of",
    "_C._distributed_c10d._ProcessGroupWrapper": "wraps a backend for debugging",
    "_C._get_tracing_state": "tells whether torch.jit traces",
    "_C._len_torch_function_stack": "counts the modes that see functions",
    "_C._len_torch_dispatch_stack": "counts the dispatch modes of this thread",
    "_C._profiler._RecordFunctionFast": "is an event of the profiler",
    "_C._storage_Use_Count": "counts the tensors of a storage",
    "_C._will_engine_execute_node": "tells what the backward pass is for",
    "Tensor._backward_hooks": "tells whether hooks of a tensor see its gradient",
    "Tensor._indices": "is memory of a sparse tensor",
    "Tensor._values": "is memory of a sparse tensor",
    "Tensor._nnz": "counts the entries of a sparse tensor",
    "autograd.forward_ad._current_level": "tells whether forward-mode differentiation runs",
    "_amp_foreach_non_finite_check_and_unscale_": "is what GradScaler does to gradients",
    "UntypedStorage._cdata": "tells storages apart",
    "UntypedStorage._get_shared_fd": "is the file of a shared storage",
    "UntypedStorage._new_shared_fd_cpu": "makes a storage of a file",
    "UntypedStorage._swap_data_ptr_": "moves a storage's bytes in place",
    "autograd.Variable._execution_engine.queue_callback": "calls back after a backward pass",
    "distributed.ProcessGroup._register_backend": "gives a group a backend",
    "distributed.ProcessGroup._set_default_backend": "says which of them barriers use",
    "distributed.ProcessGroup._set_group_desc": "describes a group",
    "distributed.ProcessGroup._set_group_name": "names a group",
    "distributed.ProcessGroupGloo._Options._devices": "chooses gloo's network interface",
    "distributed.ProcessGroupGloo._Options._timeout": "is gloo's time-out",
    "distributed.distributed_c10d._world.group_count": "counts the groups ever made, for names",
    "distributed.distributed_c10d._world.pg_group_ranks": "has the ranks of each group",
    "distributed.distributed_c10d._world.pg_map": "lists the groups of this process",
    "futures.Future._set_unwrap_func": "lets a future raise when its value is taken",
    "nn.parallel.DistributedDataParallel._active_ddp_module": "is the one whose forward pass runs",
    "ops.c10d.allreduce_.default._schema": "tells what an operator returns",
    "utils._python_dispatch._disable_current_modes": "leaves all dispatch modes",
    "utils._python_dispatch._pop_mode": "leaves one",
    "utils._python_dispatch._push_mode": "enters one",
}
"""Paths below ``torch``, and the purpose of each."""

OVERRIDDEN = (
    "_allgather_base",
    "_apply",
    "_device_types",
    "_get_backend",
    "_get_sequence_number_for_group",
    "_reduce_scatter_base",
    "_set_default_timeout",
    "_set_sequence_number_for_group",
    "_source_rank",
)
"""Methods of this plug-in that torch calls on groups, works and modules."""

FRAMES = {
    "persistent_id": "torch's search for the tensors in a future's value",
    "_maybe_attach_flight_recorder": "torch's flight recorder; 2.15 and later",
    "_new_process_group_helper": "knows the group's other backends; 2.14 and later",
    "_engine_run_backward": "calls the backward pass, and so DDP's reducer",
}
"""Functions of torch that are recognised as callers.

Without `_engine_run_backward` DDP without a comm hook copies its buckets, and Ctrl-C waits for the
operation's end; the others are harmless if missing.
"""


MODULES = {"torch._dynamo.trace_rules": "lists what torch.compile does not trace"}
"""Modules that are patched when another module imports them.

`test_compiled_ddp` and `test_compiled_models` need them.
"""


def check() -> None:
    """Check that every name exists.

    Raises:
        ImportError: A name does not exist in this version of torch.
    """
    check_names(torch, NAMES, "torch")


def hook_of(name: str) -> Any:
    """Return one of torch's classes of hooks, which version 2.13 does not have."""
    return getattr(c10d, name)


def is_transforming() -> bool:
    """Return whether functions are replaced, traced, vectorized or differentiated forwards."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_function_stack() > 0
        or forward_ad._current_level >= 0
    )


check()

TAKES_BACKENDS = hasattr(c10d.Backend, "reconfigure")
"""Whether Python may subclass c10d's Backend: since version 2.14."""
count_modes = torch._C._len_torch_dispatch_stack
"""Returns the number of dispatch modes that are active in this thread."""
current_backward_pass = torch._C._current_graph_task_id
"""Returns the number of the backward pass that runs in this thread; -1 outside of one."""
profiling = torch._C._autograd._profiler_enabled
"""Returns whether this thread is profiled."""
unscale_gradients = torch._amp_foreach_non_finite_check_and_unscale_
"""Divides gradients by GradScaler's scale, and looks for infinities in them."""
storage_users = torch._C._storage_Use_Count
"""Returns the number of tensors of a storage, given its ``_cdata``."""
will_run = torch._C._will_engine_execute_node
"""Returns whether the backward pass that runs in this thread comes to a node of the graph."""
run_backward_code: Any = getattr(getattr(graph, "_engine_run_backward", None), "__code__", None)
"""The code object that runs the backward pass; None where torch has moved it."""
