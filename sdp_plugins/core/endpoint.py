"""What runs the operations of a group on this rank."""

from __future__ import annotations

from . import _native
from .internode.spanning_group import SpanningGroup

Endpoint = _native.NativeGroup | SpanningGroup
"""The native group of one node's ranks, or a group that spans nodes, with the same methods."""
