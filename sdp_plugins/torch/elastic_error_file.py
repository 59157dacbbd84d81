"""The error that torchrun's summary shows for a rank whose group has failed.

torchrun terminates the other ranks as soon as one has ended, often before they print their errors.
Its summary shows the content of the file that TORCHELASTIC_ERROR_FILE names on each rank.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from sdp_plugins.core import PeerLostError
from sdp_plugins.core.environment import environment
from sdp_plugins.core.open_groups import GroupObserver, OpenGroup

_LATER_S = 2
"""Seconds added to the time of an error that reports a lost rank. torchrun takes the failure with
the earliest second for the root cause, and notices the end of a lost rank after its peers do."""


class ElasticErrorFile(GroupObserver):
    """Writes a group's first failure, as torch's `@record` writes the exception of `main`."""

    def group_failed(self, group: OpenGroup, error: Exception) -> None:
        """Write the error if torchrun started this rank and the file does not exist yet."""
        path = environment().get("TORCHELASTIC_ERROR_FILE")
        if not path or Path(path).exists():
            return
        when = int(time.time()) + (_LATER_S if isinstance(error, PeerLostError) else 0)
        text = f"{type(error).__name__}: {error}"
        message = {"message": text, "extraInfo": {"timestamp": str(when)}}
        whole = Path(f"{path}.new")
        whole.write_text(json.dumps({"message": message}))
        whole.replace(path)  # torchrun may terminate this process at any time
