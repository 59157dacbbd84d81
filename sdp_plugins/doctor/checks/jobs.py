"""Other jobs of this user on this machine."""

from __future__ import annotations

from collections.abc import Iterator

from sdp_plugins.doctor.finding import Finding, ok, skipped, warning
from sdp_plugins.doctor.machine import Machine


def other_jobs(machine: Machine) -> Iterator[Finding]:
    """No job that has lost a rank holds memory, and none uses the cores."""
    if "error" in machine.imports.found.get("native", {"error": ""}):  # it reads their segments
        yield skipped("the native core, which finds them, cannot be imported")
        return
    from sdp_plugins.flight.jobs import find_jobs
    from sdp_plugins.flight.segments import read_segments

    jobs = find_jobs(read_segments().snapshots)
    for job in jobs:
        ended = {s.info.pid for s in job.snapshots if s.liveness == "ended"}
        alive = [str(pid) for pid in job.pids if pid not in ended]
        if ended and alive:
            yield warning(
                f"{job.title} has lost {len(ended)} of its ranks; the others hold its memory",
                f"if it is yours, end it: kill {' '.join(alive)}",
            )
        elif alive:
            yield warning(
                f"{job.title} runs here and uses the cores",
                f"wait for its end, or if it is yours, end it: kill {' '.join(alive)}",
                slows=True,
            )
    if not jobs:
        yield ok("no other job of this user has an open group")
