"""All private names of torch that the Keras plug-in uses.

Importing this module checks them; creating a strategy on torch imports it.
"""

from __future__ import annotations

import torch

from sdp_plugins.core.private_names import check_names

NAMES = {
    "_C._storage_Use_Count": "tells whether another tensor has a gradient's memory",
    "UntypedStorage._cdata": "tells storages apart",
    "_foreach_copy_": "copies averages into gradients by one call",
    "_foreach_mul_": "multiplies all gradients by one call",
    "_foreach_zero_": "clears them by one call",
    "autograd.Variable._execution_engine.queue_callback": "calls back after a backward pass",
}
"""Paths below ``torch``, and the purpose of each."""

check_names(torch, NAMES, "keras,torch")

uses_of_storage = torch._C._storage_Use_Count
"""Returns how many tensors and storage objects use the memory of a storage's ``_cdata``."""
at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
"""Queues a callback for the end of the current backward pass; DDP and FSDP use it, too."""
