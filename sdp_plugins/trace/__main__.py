"""The command `python -m sdp_plugins.trace merge FOLDER [JOB]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Merge traces; other arguments are those of the flight recorder's former command."""
    if arguments[:1] == ["merge"]:
        from sdp_plugins.trace import merge

        return merge.main(arguments[1:])
    print(
        "python -m sdp_plugins.trace is deprecated and will be removed in the next release: use "
        "python -m sdp_plugins.flight. (python -m sdp_plugins.trace merge FOLDER merges traces.)",
        file=sys.stderr,
    )
    from sdp_plugins.flight import cli

    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
