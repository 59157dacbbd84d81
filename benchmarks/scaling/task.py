"""In a rank: the commands of `scaling` beyond those of `ddp`."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from benchmarks.ddp_task import DdpTask


class ScalingTask(DdpTask):
    """Trains variants, and returns their results to a command that compares several jobs."""

    def outcome(self, variant: str) -> dict[str, Any]:
        """Return a hash of the trained weights and one of gradients; rank 0 adds the gradients.

        The gradients are those of the untrained model, whose weights are restored permanently.
        Between variants that sum in different orders, training would amplify every difference.
        """
        trained, weights = self.variants[variant], self.fingerprint(variant)
        with torch.no_grad():
            fresh = trained.workload.build().parameters()
            for now, before in zip(trained.model.parameters(), fresh, strict=True):
                now.copy_(before)
        gradients = trained.gradients(self.place.rank).numpy()
        return {
            "weights": weights,
            "gradients": hashlib.sha256(gradients.tobytes()).hexdigest(),
            "vector": None if self.place.rank else gradients,
        }
