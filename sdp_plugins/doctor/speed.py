"""Measures how fast two ranks of `sdp run` are on this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sdp_plugins.core.config import MIB
from sdp_plugins.doctor.finding import Finding, error, ok, text_and_remedy, warning
from sdp_plugins.doctor.importing import marked
from sdp_plugins.doctor.machine import Machine
from sdp_plugins.launch.answers import answer_of
from sdp_plugins.launch.job_environment import without_place
from sdp_plugins.launch.spawn import own_program

SUBJECT = "Speed"
NAMES = ("speed", "path")
RANK = "sdp_plugins.doctor.speed_rank"
_TIME_OUT = 124  # of sdp run
_GRACE_S = 10.0  # for sdp run to end its ranks
_RECORDED = ("SDP_TRACE", "SDP_FLIGHT_DIR", "SDP_JOIN", "SDP_ROSTERS")
_EXPECTED = {"gloo": 4.0, "memcpy": 0.5}
"""What an idle machine exceeds; README's table and docs/benchmarks.md have what was measured."""


@dataclass(frozen=True)
class Case:
    """One size of buffer.

    Attributes:
        nbytes: The size.
        path: The path that it took: inline, staged or zero-copy.
        us: Microseconds of an all_reduce.
        reference_us: Those of the reference; 0: there is none.
        ratio: Median of the rounds' ratios; 0: there is none.
    """

    nbytes: int
    path: str
    us: float
    reference_us: float = 0.0
    ratio: float = 0.0

    @property
    def size(self) -> str:
        """The size in words."""
        return f"{self.nbytes // MIB} MiB" if self.nbytes >= MIB else f"{self.nbytes // 1024} KiB"

    @property
    def time(self) -> str:
        """The time in words."""
        return f"{self.us / 1000:.1f} ms" if self.us >= 1000 else f"{self.us:.0f} µs"


@dataclass(frozen=True)
class Speed:
    """What was measured.

    Attributes:
        reference: With what smddp was compared: gloo or memcpy; empty: with nothing.
        cases: By size, the largest first; empty if it failed.
        failed: Why it failed.
        limit_s: The time-out that ended it; 0: none did.
        no_gloo: Why gloo cannot be measured.
        not_shared: Why a buffer cannot move into shared memory.
    """

    reference: str = ""
    cases: Sequence[Case] = ()
    failed: str = ""
    limit_s: float = 0.0
    no_gloo: str = ""
    not_shared: str = ""

    @property
    def compared(self) -> Sequence[Case]:
        """The cases that have a reference."""
        return [case for case in self.cases if self.reference and case.reference_us]


def measure(machine: Machine, limit_s: float) -> Speed:
    """Start two ranks, and read what rank 0 prints."""
    kind = "torch" if "torch" in machine.packages else "core"
    launcher = own_program("sdp_plugins.launch.cli:main")[1:]
    options = ["--no-prefix", "--no-status", "--timeout", str(limit_s)]
    environment = without_place(machine.environment)
    try:
        done = answer_of(
            [machine.python, *launcher, "run", "-n", "2", *options, "-m", RANK, kind],
            {name: value for name, value in environment.items() if name not in _RECORDED},
            limit_s + _GRACE_S,
            cwd="/",  # no file of the current folder hides a module
        )
    except (OSError, subprocess.TimeoutExpired) as failed:
        return Speed(failed=f"sdp run does not end ({failed})")
    if done.returncode == _TIME_OUT:
        return Speed(limit_s=limit_s)
    found = marked(done.stdout)
    if done.returncode or not found:
        return Speed(failed=_reason(done.stderr) or f"exit code {done.returncode}")
    (result,) = found
    return Speed(**{**result, "cases": [Case(**case) for case in result["cases"]]})


def _reason(errors: str) -> str:
    """The launcher's last words, which name the root cause."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1].removeprefix("sdp run: ") if lines else ""


def findings(speed: Speed) -> Iterator[Finding]:
    """What the measurement says."""
    for name, found in (("speed", _of_speed(speed)), ("path", _of_path(speed))):
        for finding in found:
            yield replace(finding, subject=SUBJECT, check=name)


def _of_speed(speed: Speed) -> Iterator[Finding]:
    if speed.limit_s:
        text = f"the speed was not measured: two ranks take longer than {speed.limit_s:g} s"
        yield warning(text, f"sdp doctor --timeout {max(300, 4 * speed.limit_s):g}")
        return
    if not speed.cases:
        yield error(
            f"two ranks that reduce on this machine fail: {speed.failed}",
            f"sdp run -n 2 -m {RANK} torch (without torch: core) shows all of their output",
        )
        return
    if not speed.reference:
        yield warning(
            f"gloo cannot start ({speed.no_gloo}), so there is nothing to compare with",
            "unset GLOO_SOCKET_IFNAME, or name an interface",
        )
    for case in speed.compared:
        text = f"all_reduce of {case.size} is {case.ratio:.1f} times as fast as {speed.reference}"
        if case.ratio < _EXPECTED[speed.reference]:
            yield warning(
                f"{text}, which is little",
                "remove what slows it down, and run sdp doctor again on an idle machine",
            )
        else:
            yield ok(text)


def _of_path(speed: Speed) -> Iterator[Finding]:
    if not speed.cases:
        return
    largest = speed.cases[0]
    if largest.path == "zero-copy":
        yield ok(f"buckets of {largest.size} are reduced where they are (zero-copy)")
    elif speed.not_shared:
        yield warning(
            f"buckets are copied ({largest.path}): {text_and_remedy(speed.not_shared)[0]}",
            "free memory, or raise the container's limit",
            slows=True,
        )
    else:
        yield warning(
            f"buckets are copied ({largest.path}), as SDP_REGISTER is off",
            "unset SDP_REGISTER",
            slows=True,
        )
