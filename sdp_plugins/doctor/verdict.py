"""The last sentence: whether smddp is in use here, how fast it is, and why it is not faster."""

from __future__ import annotations

from collections.abc import Sequence

from sdp_plugins.doctor.finding import Finding, Status
from sdp_plugins.doctor.speed import Speed

_NEEDED = ("native-module", "installation", "torch-backend", "speed")
"""Checks without which smddp is not in use, the cause before its effects."""


def verdict(findings: Sequence[Finding], speed: Speed | None) -> str:
    """The sentence."""
    errors = [finding for finding in findings if finding.status is Status.error]
    for name in _NEEDED:
        if cause := next((finding for finding in errors if finding.check == name), None):
            return f"smddp is not in use here: {cause.text}."
    first = f"smddp {_how_fast(speed)}" if speed else "smddp can be used here"
    counted = f"{len(errors)} error{'s' if len(errors) > 1 else ''}"
    but = f", but there {'are' if len(errors) > 1 else 'is'} {counted}" if errors else ""
    return f"{first}{but}; {_why(findings)}."


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
