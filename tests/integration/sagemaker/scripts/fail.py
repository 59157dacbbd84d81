"""The last rank fails in the way that its argument says."""

import argparse
import os
import signal

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--how")
how = parser.parse_args().how

dist.init_process_group("smddp")
rank, last = dist.get_rank(), dist.get_world_size() - 1
dist.barrier()
if rank == last and how == "raise":
    raise ValueError("the data are not what they were")
if rank == last and how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(5 if rank == last and how == "mismatch" else 4))
