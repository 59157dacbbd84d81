"""SMDDP's names for TensorFlow."""

from sdp_plugins.tensorflow import *  # noqa: F403
