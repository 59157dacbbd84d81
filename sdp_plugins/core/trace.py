"""Deprecated: `sdp_plugins.trace` is the module."""

from __future__ import annotations

import warnings

from sdp_plugins.trace import add_span, span, start, stop

__all__ = ["add_span", "span", "start", "stop"]

warnings.warn(
    "sdp_plugins.core.trace is deprecated and will be removed in the next release: import "
    "sdp_plugins.trace.",
    DeprecationWarning,
    stacklevel=2,
)
