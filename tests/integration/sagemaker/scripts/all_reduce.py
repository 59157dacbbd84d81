"""Says what every rank of a job finds, as JSON in the model's folder."""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--text", default="")
arguments = parser.parse_args()

dist.init_process_group("smddp")
tensor = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
found = {
    "rank": dist.get_rank(),
    "size": dist.get_world_size(),
    "sum": tensor[0].item(),
    "host": os.uname().nodename,
    "arguments": vars(arguments),
    "mpi": "mpi4py.MPI" in sys.modules,
    "cores": len(os.sched_getaffinity(0)),
    "environment": dict(os.environ),
}
Path(os.environ["SM_MODEL_DIR"], f"{dist.get_rank()}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
