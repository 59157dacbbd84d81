"""Imports what DDP and optimizers import at their first use, so that it is in what forks ranks."""

import torch._dynamo  # noqa: F401
