"""What the ranks of this launcher's job wait for, when it is asked by SIGUSR1."""

from __future__ import annotations

import os


def who_waits() -> str:
    """Who waits for whom, of the ranks on this machine.

    The launcher does not pass the signal on: a rank that has no group yet would be ended by it.
    """
    # A part of the core that jobs start without.
    from sdp_plugins.core.flight.jobs import jobs, meant
    from sdp_plugins.core.flight.report import report
    from sdp_plugins.core.flight.segments import look

    mine = meant(jobs(look().sheets), str(os.getpid()))
    if not mine:
        return "SIGUSR1: no rank on this machine has an open group"
    lines = [line for job in mine for line in (job.title, *report(job.sheets))]
    return "\n".join(["SIGUSR1: the ranks on this machine at the moment", *lines])
