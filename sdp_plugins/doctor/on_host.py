"""The doctor on another host of the job: started by ssh, it prints its report as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from sdp_plugins.core.environment import environment
from sdp_plugins.doctor.examination import examine
from sdp_plugins.doctor.importing import MARK
from sdp_plugins.doctor.machine import Machine


def main() -> None:
    """Entry point; stdin has the request."""
    clock, began = time.time(), time.monotonic()
    given = json.load(sys.stdin)
    machine = Machine(
        environment={**environment(), **given["environment"]},
        folder=Path(given["folder"]),
        given_ranks=given["ranks"],
        hosts=tuple(given["hosts"]),
    )
    report = examine(machine, given["limit_s"], given["only"]).as_json()
    took_s = time.monotonic() - began
    print(MARK + json.dumps({"report": report, "clock": clock, "took_s": took_s}), flush=True)
