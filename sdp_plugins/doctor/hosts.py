"""Runs the doctor on the other hosts of a job, by ssh."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from sdp_plugins.doctor.finding import Finding, error, text_and_remedy
from sdp_plugins.doctor.importing import marked
from sdp_plugins.doctor.machine import Machine
from sdp_plugins.doctor.report import Report
from sdp_plugins.launch.hosts import preflight
from sdp_plugins.launch.hosts.addresses import is_here
from sdp_plugins.launch.hosts.host_job import forwarded_names
from sdp_plugins.launch.job_environment import without_place
from sdp_plugins.launch.spawn import own_program

_READ_S = 0.5  # to read what a host has answered while another one was waited for


@dataclass(frozen=True)
class Answer:
    """What a host has answered.

    Attributes:
        host: Its name, as the user wrote it.
        report: None: there is none.
        failure: Why there is none.
        skew_s: By how much its clock differs from ours at least, in seconds.
        is_here: Whether it is this host, and has our report.
    """

    host: str
    report: Report | None = None
    failure: Finding | None = None
    skew_s: float = 0.0
    is_here: bool = False


def ask_hosts(
    machine: Machine, own: Report, only: Iterable[str], speed_s: float, limit_s: float
) -> list[Answer]:
    """Run the doctor on each host of `machine` that is not this one.

    Args:
        machine: This host.
        own: Its report.
        only: Names of the checks to run; empty: all.
        speed_s: How long the measurement may take; 0: it is left out.
        limit_s: How long a host may take.

    Returns:
        The answers in the order of the hosts; of this one, its report.
    """
    found = machine.addresses
    others = [host for host, address in found.items() if address and not is_here(address)]
    environment = without_place(machine.environment)
    request = {
        "environment": {name: environment[name] for name in forwarded_names(environment, ())},
        "folder": str(machine.folder),
        "ranks": machine.given_ranks,
        "hosts": machine.hosts,
        "limit_s": speed_s,
        "only": list(only),
    }
    answers = {host: Answer(host, replace(own, host=host), is_here=True) for host in found}
    for host in (host for host, address in found.items() if not address):
        remedy = f"check the spelling, and `getent hosts {host}`"
        answers[host] = _failed(host, f"{host} has no address here", remedy)
    for first in range(0, len(others), preflight.AT_ONCE):
        some = others[first : first + preflight.AT_ONCE]
        for answer in _ask(some, json.dumps(request), environment, limit_s):
            answers[answer.host] = answer
    return list(answers.values())


def _failed(host: str, text: str, remedy: str) -> Answer:
    return Answer(host, failure=error(text, remedy))


def _ask(
    hosts: Sequence[str], request: str, environment: Mapping[str, str], limit_s: float
) -> Iterator[Answer]:
    """Ask some hosts, all at once."""
    program = preflight.agent(None, environment) or ["ssh"]
    command = preflight.for_a_shell(own_program("sdp_plugins.doctor.on_host:main"), environment)
    began, end = time.time(), time.monotonic() + limit_s
    with ExitStack() as stack:
        processes = []
        for host in hosts:
            line = [*preflight.reaching(program, host), command]
            try:
                with _readable(request) as stdin:
                    started = preflight.started(line, environment, stdin)
                    processes.append(stack.enter_context(started))
            except OSError as failed:
                text = f"{program[0]} cannot be started ({failed.strerror})"
                yield from (_failed(host, text, "apt-get install openssh-client") for host in hosts)
                return
        for host, process in zip(hosts, processes, strict=True):
            try:
                left_s = max(_READ_S, end - time.monotonic())
                output, errors = process.communicate(timeout=left_s)
            except subprocess.TimeoutExpired:
                text = f"{host} does not answer {program[0]} in {limit_s:g} s"
                yield _failed(host, text, f"run `{program[0]} {host}` by hand")
            else:
                if process.returncode:
                    told = preflight.complaint(program[0], host, process.returncode, output, errors)
                    yield _failed(host, *text_and_remedy(told))
                else:
                    yield _answer(host, output, began)


@contextmanager
def _readable(text: str) -> Iterator[int]:
    """A descriptor from which a program reads the text, however late."""
    file = os.memfd_create("sdp-request", os.MFD_CLOEXEC)
    try:
        os.write(file, text.encode())
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def _answer(host: str, output: str, began: float) -> Answer:
    """The report in a host's output, and what it says of its clock."""
    ended = time.time()
    try:
        found = marked(output)[-1]
        report = replace(Report.from_json(found["report"]), host=host)
        skew_s = skew(began, ended, found["clock"], found["took_s"])
    except (ValueError, LookupError, TypeError) as failed:
        text = f"{host} answers, but not with a report of this version ({failed})"
        return _failed(host, text, "install the same version of sdp-plugins on all hosts")
    return Answer(host, report, skew_s=skew_s)


def skew(began: float, ended: float, clock: float, took_s: float) -> float:
    """By how much another clock differs from ours at least.

    Args:
        began: Our clock when the other host was called.
        ended: Our clock when it had answered.
        clock: Its clock when its program began.
        took_s: How long that took.
    """
    return max(0.0, began - clock, clock - (ended - took_s))
