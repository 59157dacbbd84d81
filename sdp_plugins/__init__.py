"""Balanced fusion buffers and a CPU AllReduce, with plug-ins for deep-learning frameworks.

Importing this package imports no framework; see `sdp_plugins.core` and `sdp_plugins.torch`.
"""

__version__ = "0.1.0"
