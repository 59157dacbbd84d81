"""A SageMaker training script: recognise handwritten digits, on all ranks of the job.

Nothing in it is of SageMaker's but the folders' variables, and it needs no GPU. The channel
`training` holds digits.csv, 65 numbers in a line: 64 pixels of 0 to 16, then the digit. Without a
channel the digits come from scikit-learn.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
parser.add_argument("--learning-rate", type=float, default=0.1)
parser.add_argument("--data", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING"))
parser.add_argument("--model-dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "."))


def read_digits(folder: Path | None) -> TensorDataset:
    """Pixels of 0 to 1, shape [digits, 64], and which digit each is."""
    if folder:
        table = np.loadtxt(folder / "digits.csv", delimiter=",", dtype=np.float32)
        pixels, digits = table[:, :-1], table[:, -1]
    else:
        from sklearn.datasets import load_digits

        pixels, digits = load_digits(return_X_y=True)
    return TensorDataset(
        torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits).long()
    )


def main() -> None:
    """Train, and let rank 0 test and save the model."""
    arguments = parser.parse_args()
    dist.init_process_group("smddp")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    digits = read_digits(arguments.data)
    train = torch.utils.data.Subset(digits, range(0, len(digits) * 4 // 5))
    test = torch.utils.data.Subset(digits, range(len(digits) * 4 // 5, len(digits)))
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, batch_size=arguments.batch_size // ranks, sampler=sampler)
    layers = [torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate, momentum=0.9)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for pixels, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:  # CloudWatch finds the metrics by regular expressions: see docs/sagemaker.md
            pixels, labels = test[:]
            accuracy = (model.module(pixels).argmax(1) == labels).float().mean()
            print(
                f"epoch={epoch}; train_loss={loss:.6f}; test_accuracy={accuracy:.4f};", flush=True
            )
    if rank == 0:
        torch.save(model.module.state_dict(), arguments.model_dir / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
