"""`python -m sdp_plugins.tensorflow` compiles the operation ahead of its first use."""

from __future__ import annotations

import sys

from sdp_plugins.core.native_build import compile_ahead

from . import operations

if __name__ == "__main__":
    sys.exit(compile_ahead("sdp_plugins.tensorflow", operations.all_reduce))
