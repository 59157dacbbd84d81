"""Deprecated: `python -m sdp_plugins.trace merge` is the command."""

from __future__ import annotations

import sys

from sdp_plugins.trace.merge import main

if __name__ == "__main__":
    print(
        "python -m sdp_plugins.launch.merge_trace is deprecated and will be removed in the next "
        "release: use python -m sdp_plugins.trace merge.",
        file=sys.stderr,
    )
    sys.exit(main(sys.argv[1:]))
