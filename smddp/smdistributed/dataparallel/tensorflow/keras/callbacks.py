"""SMDDP's callbacks for Keras."""

from sdp_plugins.tensorflow.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
)

__all__ = ["BroadcastGlobalVariablesCallback", "MetricAverageCallback"]
