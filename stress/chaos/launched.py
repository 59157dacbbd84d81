"""A job under `sdp run`; this file is also the script of its ranks.

sdp run -n 3 stress/chaos/launched.py FOLDER      # the folder with the pickled job
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 90.0
TIDY_UP_S = 20.0
"""Time for the launcher to wait for survivors, and then for the ranks that it terminates."""


def script(folder: Path) -> None:
    """Run one rank."""
    sys.path.insert(0, str(ROOT))
    from stress.chaos.rank import run_rank

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job = pickle.loads((folder / "job").read_bytes())
    with (folder / f"rank-{rank}").open("ab", buffering=0) as told:

        def tell(what: Any) -> None:
            told.write(pickle.dumps(what))

        run_rank(rank, world, job, 0, tell)


def read(path: Path) -> dict[str, Any]:
    """Return a rank's messages; the first of each kind."""
    said: dict[str, Any] = {}
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    what, value = pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    break
                said.setdefault(what, value)
    return said


def play_launched(job: Any) -> tuple[Any, str]:
    """Run a job under the launcher; return the verdict and the output."""
    from stress.chaos.leftovers import Leftovers
    from stress.chaos.promises import ENDED_BY_THE_LAUNCHER, Fate, judge

    before = Leftovers.now()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(job))
        command = [sys.executable, "-m", "sdp_plugins.launch", "run", "-n", str(job.world)]
        command += [str(Path(__file__)), name]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        ended_at = time.monotonic()
        said = [read(folder / f"rank-{rank}") for rank in range(job.world)]
    fault_at = min((s["fault"] for s in said if "fault" in s), default=ended_at)
    fates = [Fate(s.get("end"), None, ended_at) for s in said]
    for fate in fates:  # the launcher reports how they ended; `exited_at` is its own end
        if fate.end is not None:
            fate.exitcode, fate.exited_at = (1 if fate.end.error else 0), fate.end.at
    if job.life == "creation":  # ranks wait at the store for longer than the launcher allows
        fates = [fate if fate.end else ENDED_BY_THE_LAUNCHER for fate in fates]
    verdict = judge(job, fates, fault_at)
    if ended_at - fault_at > job.timeout_s + job.pause_s + TIDY_UP_S:
        verdict.problems.append(f"the launcher ended {ended_at - fault_at:.1f} s after the fault")
    verdict.problems += conclusion(job, done.returncode, done.stderr)
    verdict.problems += before.since()
    return verdict, done.stdout + done.stderr


CODES = {"kill": 137, "os._exit": 3}


def conclusion(job: Any, code: int, stderr: str) -> list[str]:
    """Return the errors in the launcher's exit code and in the ranks that it names."""
    from stress.chaos.jobs import HARMLESS

    expected = 0 if job.fault in HARMLESS else CODES.get(job.fault, 1)
    found = [] if code == expected else [f"the launcher ended with {code}, not {expected}"]
    named = [int(rank) for rank in re.findall(r"sdp run: rank (\d+) \(.*\) failed first", stderr)]
    blamable = job.fault in ("kill", "raise", "exit 1", "os._exit")
    if blamable and (len(named) != 1 or named[0] not in job.victims):
        found.append(f"the launcher names {named} instead of one of {job.victims}")
    return found


if __name__ == "__main__":
    script(Path(sys.argv[1]))
