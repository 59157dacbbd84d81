"""The process that ssh starts on each host of an elastic job: it becomes one agent per rank.

The agents are children of this process and end with it. One that ends leaves the others.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from sdp_plugins.launch.hosts import agent
from sdp_plugins.launch.spawn import child_setup


def main() -> None:
    """Entry point; stdin has what no other user of this host may see, such as the job's token."""
    given = json.load(sys.stdin)
    try:
        os.chdir(given["folder"])
    except OSError as error:
        agent.fail(f"{os.uname().nodename} has no folder {given['folder']} ({error.strerror})")
    os.environ.update(given["environment"])
    setup = child_setup(set(), death_signal=signal.SIGTERM)
    for local_rank in range(int(os.environ["LOCAL_WORLD_SIZE"])):
        if os.fork() == 0:
            setup()
            os.environ["RANK"] = str(given["first"] + local_rank)
            os.environ["LOCAL_RANK"] = str(local_rank)
            sys.argv[1:] = given["arguments"]
            agent.main()
            return
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return
