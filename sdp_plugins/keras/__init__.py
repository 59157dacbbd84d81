"""Keras 3 on its TensorFlow, torch and JAX backends: one scope, an unchanged ``model.fit``.

import sdp_plugins.keras as sdp

strategy = sdp.SMDDPStrategy()
with strategy.scope():
    model = build()
    model.compile(optimizer, loss, metrics)
model.fit(x, y, batch_size=256)  # the batch of all ranks together
"""

from sdp_plugins.core.local_updates.outer_step import OuterStep

from .local_updates import SMDDPLocalUpdates
from .monitor import SMDDPMonitor
from .strategy import SMDDPStrategy

__all__ = ["OuterStep", "SMDDPLocalUpdates", "SMDDPMonitor", "SMDDPStrategy"]
