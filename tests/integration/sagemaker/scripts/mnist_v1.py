"""A script in the pattern of those for SMDDP 1.0: digits, its own collectives and wrapper."""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, distributed

import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

dist.init_process_group()

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
arguments = parser.parse_args()
torch.manual_seed(0)
pixels, digits = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(digits))
size, rank = dist.get_world_size(), dist.get_rank()
sampler = distributed.DistributedSampler(data, num_replicas=size, rank=rank)
loader = DataLoader(data, batch_size=64 // size, shuffle=False, sampler=sampler)
model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(arguments.epochs):
    model.train()
    for batch, target in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()
if rank == 0:
    model.eval()
    with torch.no_grad():
        right = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean().item()
    print(f"Test set: Accuracy: {right:.3f}", flush=True)
    torch.save(model.state_dict(), os.path.join(arguments.model_dir, "mnist.pt"))
