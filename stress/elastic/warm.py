"""Imports what a rank needs, once, for all ranks that are forked from this process."""

from __future__ import annotations

import torch

from stress.elastic.rank import made

torch.set_num_threads(1)
_model, _optimizer = made()
for _parameter in _model.parameters():
    _parameter.grad = torch.zeros_like(_parameter)
_optimizer.step()  # imports a compiler, which takes seconds
