"""Handwritten digits with PyTorch's DistributedDataParallel over smddp.

    sdp run -n 2 examples/digits_torch.py
    sdp run -n 1 examples/digits_torch.py    # one process that has all cores, with the same batches

Nothing but the name of the backend differs from a script for gloo. It needs scikit-learn, which has
the images.
"""

import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH_SIZE, TESTED = 10, 64, 360  # a batch of all ranks together


def main() -> None:
    """Train on all images but the last, which are for the test."""
    dist.init_process_group("smddp")
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    known = TensorDataset(images[:-TESTED], labels[:-TESTED])
    sampler = DistributedSampler(known, seed=0)  # each rank gets other images
    batches = DataLoader(known, BATCH_SIZE // dist.get_world_size(), sampler=sampler)

    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began = time.perf_counter()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch, expected in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), expected).backward()
            optimizer.step()
    speed = EPOCHS * len(known) / (time.perf_counter() - began)
    with torch.no_grad():
        hits = (model(images[-TESTED:]).argmax(dim=1) == labels[-TESTED:]).float().mean()
    if dist.get_rank() == 0:
        ranks, backend = dist.get_world_size(), dist.get_backend()
        accuracy = f"{hits:.1%} of {TESTED} digits"
        print(f"{ranks} ranks over {backend}: {accuracy}, {speed:,.0f} images/s in training")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
