"""What torchrun's summary says of a rank whose group has failed.

torchrun ends the other ranks as soon as one has ended, often before their errors reach the
terminal. Its summary shows what each rank has left in the file that TORCHELASTIC_ERROR_FILE names.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from sdp_plugins.core import PeerLostError
from sdp_plugins.core.environment import environment
from sdp_plugins.core.open_groups import GroupObserver, OpenGroup

_LATER_S = 2
"""torchrun takes the failure with the earliest second for the root cause, and notices the end of a
lost rank after the rank that lost it."""


class ElasticErrorFile(GroupObserver):
    """Writes the first failure of a group, as torch's `@record` does the exception of `main`."""

    def group_failed(self, group: OpenGroup, error: Exception) -> None:
        """Write the error, if torchrun has started this rank and nothing is written yet."""
        path = environment().get("TORCHELASTIC_ERROR_FILE")
        if not path or Path(path).exists():
            return
        when = int(time.time()) + (_LATER_S if isinstance(error, PeerLostError) else 0)
        text = f"{type(error).__name__}: {error}"
        message = {"message": text, "extraInfo": {"timestamp": str(when)}}
        whole = Path(f"{path}.new")
        whole.write_text(json.dumps({"message": message}))
        whole.replace(path)  # torchrun may end this process at any time
