"""`python -m sdp_plugins.jax` compiles ahead what is else compiled at its first use."""

from __future__ import annotations

import sys

from sdp_plugins.core.native_build import CompileError

from . import collectives


def main() -> int:
    """Compile the call; say if it cannot be."""
    try:
        collectives.register()
    except CompileError as error:
        print(f"all_reduce: not compiled: {error}")
        return 1
    print("all_reduce: compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
