"""Removes a job's folder if the program that runs the job is killed: `python cleanup.py FOLDER`.

That program holds the other end of this one's stdin. This file imports nothing of the package,
because it starts with every job.
"""

import os
import shutil
import signal
import sys
import time

# The job's ranks are being killed at the same time, and may still write: wait until the folder
# stays removed.
LOOKS, STAYS_AWAY, PAUSE_S = 50, 5, 0.2


def remove(folder: str) -> None:
    """Remove a folder, even if files are still written to it."""
    absent = 0
    for _ in range(LOOKS):
        shutil.rmtree(folder, ignore_errors=True)
        absent = 0 if os.path.lexists(folder) else absent + 1
        if absent == STAYS_AWAY:
            return
        time.sleep(PAUSE_S)


def main() -> None:
    """Wait for the program to end or to write that the job is done."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.readline() != "done\n":
        remove(sys.argv[1])


if __name__ == "__main__":
    main()
