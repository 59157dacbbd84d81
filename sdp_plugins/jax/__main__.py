"""`python -m sdp_plugins.jax` compiles the XLA call ahead of its first use."""

from __future__ import annotations

import sys

from sdp_plugins.core.native_build import compile_ahead

from . import collectives

if __name__ == "__main__":
    sys.exit(compile_ahead("sdp_plugins.jax", collectives.register))
