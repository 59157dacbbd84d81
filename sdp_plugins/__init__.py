"""Balanced fusion buffers and a CPU AllReduce, with plug-ins for deep-learning frameworks.

Importing this package imports no framework; see `sdp_plugins.core` and `sdp_plugins.torch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sdp_plugins.core.open_groups import open_groups

if TYPE_CHECKING:
    from sdp_plugins.core.config import Config
    from sdp_plugins.core.open_groups import GroupObserver

__version__ = "0.2.0.dev0"


def _observers(config: Config) -> Iterator[GroupObserver]:
    """What observes the groups: the core cannot know, because this stands above it."""
    from sdp_plugins.flight.flight_recorder import flight_recorder

    yield flight_recorder
    if config.trace is not None:
        from sdp_plugins.trace.recorder import trace_recorder

        yield trace_recorder


open_groups.install(_observers)
