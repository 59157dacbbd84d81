"""SMDDP's names for Keras."""

from sdp_plugins.tensorflow.keras import *  # noqa: F403
