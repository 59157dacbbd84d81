"""Everything that the doctor does on one host."""

from __future__ import annotations

from collections.abc import Collection

from sdp_plugins.core.announced import announced
from sdp_plugins.doctor import all_checks, speed
from sdp_plugins.doctor.machine import Machine
from sdp_plugins.doctor.report import Report, facts
from sdp_plugins.doctor.verdict import obstacle, verdict


def examine(machine: Machine, limit_s: float = 0.0, only: Collection[str] = ()) -> Report:
    """Run the checks, and measure.

    Args:
        machine: The host.
        limit_s: How long the measurement may take; 0: it is left out.
        only: Names of the checks to run; empty: all.
    """
    with announced("sdp doctor: importing torch and running the checks"):
        findings = list(all_checks.run_checks(machine, only))
    measured = None
    if limit_s and not obstacle(findings):  # the measurement would only repeat it
        with announced("sdp doctor: measuring on two ranks"):
            measured = speed.measure(machine, limit_s)
        findings += speed.findings(measured)
    sentence = "" if only else verdict(findings, measured)
    return Report(findings=findings, speed=measured, verdict=sentence, **facts(machine))
