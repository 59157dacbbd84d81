"""Checks that compare the hosts of a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from sdp_plugins.doctor.addresses import is_loopback
from sdp_plugins.doctor.checks.packages import REINSTALL
from sdp_plugins.doctor.finding import Finding, error, ok, warning
from sdp_plugins.doctor.hosts import Answer
from sdp_plugins.doctor.report import Report

SUBJECT = "Hosts"
_MOST_SKEW_S = 1.0
_MUST_AGREE = ("sdp-plugins", "torch", "tensorflow-cpu", "jax", "keras")


def hosts_reachable(own: Report, answers: Sequence[Answer]) -> Iterator[Finding]:
    """Each host has answered."""
    failures = [answer.failure for answer in answers if answer.failure]
    yield from failures or [ok(f"all {len(answers)} hosts answer")]


def hosts_versions(own: Report, answers: Sequence[Answer]) -> Iterator[Finding]:
    """All hosts have the same Python and packages."""
    same = True
    for report in _reports(answers):
        for name in sorted({*own.versions, *report.versions}):
            ours, theirs = own.versions.get(name), report.versions.get(name)
            if ours == theirs:
                continue
            same = False
            where, version = (report.host, ours) if ours else ("this host", theirs)
            remedy = f"on {where}: pip install {name}=={version}"
            if name == "sdp-plugins":
                remedy = f"on {where}: {REINSTALL}"
            elif name == "python":
                remedy = "make the same virtual environment on all hosts"
            text = f"{report.host} has {_named(name, theirs)}, this host {_named(name, ours)}"
            yield (error if name in _MUST_AGREE else warning)(text, remedy)
    if same:
        yield ok("all hosts have the same versions")


def _named(package: str, version: str | None) -> str:
    return f"{package} {version}" if version else f"no {package}"


def hosts_clocks(own: Report, answers: Sequence[Answer]) -> Iterator[Finding]:
    """The clocks agree, by which reports and logs of several hosts are compared."""
    late = [answer for answer in answers if answer.skew_s > _MOST_SKEW_S]
    for answer in late:
        yield warning(
            f"the clock of {answer.host} differs by at least {answer.skew_s:.0f} s from this one, "
            "so times in logs and error files of both cannot be compared",
            f"start a time service on {answer.host} (systemctl enable --now chronyd)",
        )
    if not late:
        yield ok("the hosts' clocks agree")


def hosts_addresses(own: Report, answers: Sequence[Answer]) -> Iterator[Finding]:
    """No host takes another one's name for its own loopback."""
    wrong = [
        (report.host, name, address)
        for report in _reports(answers)
        for name, address in report.addresses.items()
        if name not in (report.host, "localhost") and is_loopback(address)
    ]
    for host, name, address in wrong:
        yield error(
            f"on {host}, {name} means {address}, which is {host} itself",
            f"give {name} its address in /etc/hosts of {host}",
        )
    if not wrong:
        yield ok("no host's name means the loopback of another")


def hosts_memory(own: Report, answers: Sequence[Answer]) -> Iterator[Finding]:
    """Hosts that are containers of one machine share its memory."""
    apart = [
        (one.host, other.host)
        for one, other in combinations(_reports(answers), 2)
        if one.machine["boot"] == other.machine["boot"]
        and one.machine["network"] != other.machine["network"]
    ]
    for one, other in apart:
        yield warning(
            f"{one} and {other} are containers of one machine, but their ranks cannot share memory",
            "docker run --network=host (Kubernetes: one pod), or start all ranks in one container",
            slows=True,
        )
    if not apart:
        yield ok("ranks of one machine share its memory")


CHECKS = (hosts_reachable, hosts_versions, hosts_clocks, hosts_addresses, hosts_memory)
NAMES = tuple(check.__name__.replace("_", "-") for check in CHECKS)


def compare(own: Report, answers: Sequence[Answer]) -> list[Finding]:
    """Run all of these checks."""
    return [
        replace(finding, subject=SUBJECT, check=name)
        for name, check in zip(NAMES, CHECKS, strict=True)
        for finding in check(own, answers)
    ]


def _reports(answers: Sequence[Answer]) -> list[Report]:
    return [answer.report for answer in answers if answer.report]
