"""A script that knows nothing of this package."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method="env://")
one = torch.ones(1)
dist.all_reduce(one)
Path(os.environ["SM_MODEL_DIR"], f"{dist.get_rank()}").write_text(
    f"{dist.get_backend()} {one.item()}"
)
dist.barrier()
dist.destroy_process_group()
