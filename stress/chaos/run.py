"""A chaos run: jobs of which a rank is killed, stopped, slowed or made to disagree.

python -m stress.chaos.run --jobs 200 --seed 1
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict

from stress.chaos.jobs import FAULTS, Job, planned
from stress.chaos.launched import play_launched
from stress.chaos.play import play
from stress.chaos.promises import Verdict
from tests.forked import close_servers
from tests.leaks import own_shared_memory

COLUMNS = ("fault", "jobs", "clean ends", "waited beyond the promise", "from the fault on",
           "second-hand", "torch's own")  # fmt: skip


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m stress.chaos.run", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of jobs to see again")
    parser.add_argument("--verbose", action="store_true", help="show what all ranks wrote")
    return parser.parse_args(arguments)


def run(jobs: list[Job], verbose: bool = False) -> list[tuple[Job, Verdict]]:
    """Run jobs one after the other, and report each."""
    played = []
    for job in jobs:
        since = time.monotonic()
        verdict, outputs = play_launched(job) if job.launched else play(job)
        played.append((job, verdict))
        state = "clean" if not verdict.problems else "BROKEN PROMISE"
        print(f"{job}: {state}, {time.monotonic() - since:.1f} s", flush=True)
        for problem in verdict.problems:
            print(f"    {problem}", flush=True)
        if verdict.problems or verbose:
            print(outputs)
            print(f"Again: python -m stress.chaos.run --seed {job.seed} --only {job.number}")
    return played


def table(played: list[tuple[Job, Verdict]]) -> str:
    """Return a table by fault: jobs, clean ends, and the longest time over the guaranteed one."""
    rows: dict[str, list[Verdict]] = defaultdict(list)
    for job, verdict in played:
        rows[f"{job.fault}, sdp run" if job.launched else job.fault].append(verdict)
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    names = [name for fault in FAULTS for name in (fault, f"{fault}, sdp run") if name in rows]
    for name in names:
        lines.append(row(name, rows[name]))
    return "\n".join([*lines, row("all", [verdict for _, verdict in played])])


def row(name: str, verdicts: list[Verdict]) -> str:
    clean = sum(not verdict.problems for verdict in verdicts)
    over_s = max(verdict.over_s for verdict in verdicts)
    total_s = max(verdict.total_s for verdict in verdicts)
    second = sum(verdict.second_hand for verdict in verdicts)
    torchs = sum(verdict.torchs for verdict in verdicts)
    cells = (name, len(verdicts), clean, f"{over_s:.2f} s", f"{total_s:.2f} s", second, torchs)
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    """Run the jobs, and print the table."""
    asked = parsed()
    numbers = range(asked.jobs) if asked.only is None else asked.only
    jobs = [planned(asked.seed, number) for number in numbers]
    own_shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            played = run(jobs, asked.verbose)
        finally:
            close_servers()
            tempfile.tempdir = None
    print(table(played))
    return int(any(verdict.problems for _, verdict in played))


if __name__ == "__main__":
    sys.exit(main())
