"""`python -m sdp_plugins.tensorflow` compiles ahead what is else compiled at its first use."""

from __future__ import annotations

import sys

from sdp_plugins.core.native_build import CompileError

from . import operations


def main() -> int:
    """Compile all operations, those for XLA too; say what cannot be."""
    for name, compiled in (("all_reduce", operations.all_reduce), ("XLA", operations.require)):
        try:
            compiled()
        except CompileError as error:
            print(f"{name}: not compiled: {error}")
            return 1
        print(f"{name}: compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
