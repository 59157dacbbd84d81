"""The last sentence: whether smddp is in use here, how fast it is, and why it is not faster."""

from __future__ import annotations

from collections.abc import Sequence

from sdp_plugins.doctor.finding import Finding, Status
from sdp_plugins.doctor.speed import Speed

_NEEDED = (
    *("package-versions", "native-module", "installation", "torch-backend", "settings"),
    *("shared-memory", "local-sockets", "loopback", "speed"),
)
"""Checks whose errors keep smddp from working, the cause before its effects."""


def obstacle(findings: Sequence[Finding]) -> Finding | None:
    """The error that keeps smddp from working."""
    errors = {f.check: f for f in reversed(findings) if f.status is Status.error}
    return next((errors[name] for name in _NEEDED if name in errors), None)


def verdict(findings: Sequence[Finding], speed: Speed | None) -> str:
    """The sentence."""
    if cause := obstacle(findings):
        return f"smddp is not in use here: {cause.text}."
    first = f"smddp {_how_fast(speed)}" if speed and speed.cases else "smddp can be used here"
    errors = sum(finding.status is Status.error for finding in findings)
    counted = f"are {errors} errors" if errors > 1 else "is 1 error"
    return f"{first}{f', but there {counted}' if errors else ''}; {_why(findings)}."


def _how_fast(speed: Speed) -> str:
    """The ratios of all sizes."""
    if not speed.reference:
        return f"is in use here: {speed.cases[0].size} take {speed.cases[0].time}"
    parts = [
        f"{case.ratio:.1f} times {speed.reference} for {case.size} ({case.time}, {case.path})"
        for case in speed.compared
    ]
    return f"is in use here: {', '.join(parts)}"


def _why(findings: Sequence[Finding]) -> str:
    reasons = list(dict.fromkeys(finding.check for finding in findings if finding.slows))
    return f"it is slowed down by {', '.join(reasons)}" if reasons else "nothing slows it down"
