"""Every name of SMDDP's documented API is there, and takes the documented arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec

import pytest

from tests.ranks import HANG_S

# Module: its names with their arguments, as the documentation and published scripts have them.
COLLECTIVE = "group async_op"
DDP = {
    "DistributedDataParallel": "module device_ids output_device broadcast_buffers process_group "
    "bucket_cap_mb",
    "DistributedDataParallel.no_sync": "self",
}
TORCH = {
    "": {
        "start_profiler": "path append_rank",
        "stop_profiler": "",
        "_get_id_for_herring_task": "",
    },
    "torch.torch_smddp": {},
    "torch.distributed": {
        "is_available": "",
        "init_process_group": "args kwargs",
        "is_initialized": "",
        "get_world_size": "group",
        "get_rank": "group",
        "get_local_rank": "",
        "all_reduce": f"tensor op {COLLECTIVE}",
        "broadcast": f"tensor src {COLLECTIVE}",
        "all_gather": f"tensor_list tensor {COLLECTIVE}",
        "all_to_all_single": "output_t input_t output_split_sizes input_split_sizes " + COLLECTIVE,
        "barrier": COLLECTIVE,
        "reduce": "tensor dst",
        "ReduceOp.AVERAGE": None,
        "ReduceOp.SUM": None,
        "ReduceOp.MIN": None,
        "ReduceOp.MAX": None,
        "group.WORLD": None,
    },
    "torch.parallel": DDP,
    "torch.parallel.distributed": DDP,
    "exceptions": {"SMDDPError": None, "SMDDPNCCLError": None, "SMDDPTimeoutError": None},
}
TAPE = "device_dense device_sparse compression sparse_as_dense op"
TENSORFLOW = {
    "tensorflow": {
        "init": "",
        "shutdown": "",
        "size": "",
        "local_size": "",
        "rank": "",
        "local_rank": "",
        "allreduce": "tensor param_index num_params compression op",
        "oob_allreduce": "tensor compression op",
        "overlap": "tensor",
        "broadcast": "tensor root_rank",
        "broadcast_variables": "variables root_rank",
        "broadcast_global_variables": "root_rank",
        "DistributedGradientTape": f"gradtape {TAPE}",
        "DistributedOptimizer": f"optimizer name use_locking {TAPE} bucket_cap_mb",
        "BroadcastGlobalVariablesHook": "root_rank",
        "Compression.none": None,
        "Compression.fp16": None,
        "ReduceOp.AVERAGE": None,
        "ReduceOp.SUM": None,
        "ReduceOp.MIN": None,
        "ReduceOp.MAX": None,
        "get_worker_comm": "",
    },
    "tensorflow.keras": {
        "init": "",
        "size": "",
        "rank": "",
        "local_rank": "",
        "Compression.fp16": None,
        "DistributedOptimizer": "optimizer compression",
        "callbacks.BroadcastGlobalVariablesCallback": "root_rank",
        "callbacks.MetricAverageCallback": "",
    },
}
COMMANDS = ("smddprun", "smddpsinglenode", "smddpmprun")

WALK = """
import importlib, inspect, json, sys

def look(module, name, arguments):
    thing = importlib.import_module(("smdistributed.dataparallel." + module).strip("."))
    *path, last = name.split(".")
    for part in path:
        thing = getattr(thing, part)
    if not hasattr(thing, last):
        return "is missing"
    if arguments is None:
        return ""
    taken = [*inspect.signature(getattr(thing, last)).parameters]
    named = [each for each in taken if each in arguments.split()]
    return "" if named == arguments.split() else "takes " + " ".join(taken)

wanted = json.loads(sys.argv[1]).items()
found = {(m, n): look(m, n, a) for m, names in wanted for n, a in names.items()}
print(json.dumps([[*name, text] for name, text in found.items() if text]))
"""


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_names_and_arguments(framework: str) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    wanted = json.dumps(TORCH if framework == "torch" else TENSORFLOW)
    line = [sys.executable, "-W", "ignore", "-c", WALK, wanted]
    done = subprocess.run(line, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_commands() -> None:
    scripts = {entry.name for entry in metadata.entry_points(group="console_scripts")}
    assert {*COMMANDS} <= scripts
