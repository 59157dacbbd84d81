"""In a rank: what `scaling` asks beyond `ddp`."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from benchmarks.ddp_task import DdpTask


class ScalingTask(DdpTask):
    """Trains variants, and shows what they computed to a command that compares several jobs."""

    def outcome(self, variant: str) -> dict[str, Any]:
        """A digest of the trained weights; one of gradients, which rank 0 adds.

        The gradients are those of the untrained model. Its weights are put back for that, and
        stay: between variants that sum in different orders, training widens every difference.
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
