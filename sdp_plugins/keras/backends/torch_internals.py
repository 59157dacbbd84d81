"""Every private name of torch that the Keras plug-in uses.

Looked for when this module is imported, which is when a strategy is made on torch.
"""

from __future__ import annotations

from functools import reduce

import torch

NAMES = {
    "_C._storage_Use_Count": "tells whether another tensor has a gradient's memory",
    "UntypedStorage._cdata": "tells storages apart",
    "_foreach_mul_": "multiplies all gradients by one call",
    "_foreach_zero_": "clears them by one call",
    "autograd.Variable._execution_engine.queue_callback": "calls back after a backward pass",
}
"""Paths below ``torch``, and what each is for."""


def check() -> None:
    """Look for every name.

    Raises:
        ImportError: One has moved.
    """
    for path, purpose in NAMES.items():
        try:
            reduce(getattr, path.split("."), torch)
        except AttributeError:
            raise ImportError(
                f"torch {torch.__version__} has moved torch.{path}, which {purpose}. Hint: use a "
                "version of torch that this sdp-plugins was made for (pip install "
                "'sdp-plugins[keras,torch]' takes one), or a newer sdp-plugins."
            ) from None


check()

uses_of_storage = torch._C._storage_Use_Count
"""How many tensors and storage objects hold the memory of a storage's ``_cdata``."""
at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
"""What runs at the end of the backward pass under way; DDP and FSDP use it, too."""
