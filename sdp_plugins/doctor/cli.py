"""The command `sdp doctor`: is smddp in use here, how fast is it, and what slows it down."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sdp_plugins.core.announced import announced
from sdp_plugins.core.config import MAX_TIMEOUT_S
from sdp_plugins.doctor import across_hosts, all_checks
from sdp_plugins.doctor.examination import examine
from sdp_plugins.doctor.hosts import ask_hosts
from sdp_plugins.doctor.machine import Machine
from sdp_plugins.doctor.report import Report
from sdp_plugins.doctor.show import show
from sdp_plugins.doctor.verdict import verdict
from sdp_plugins.flight import closed_pipe
from sdp_plugins.launch.hosts import LaunchError
from sdp_plugins.launch.hosts.host_list import parse_hostfile, parse_hosts, placed


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="sdp doctor",
        description="Says whether smddp is in use on this machine, how much faster than gloo it "
        "is, and what slows it down. Exits with 1 if something does not work.",
    )
    made.add_argument(
        "script", nargs="?", type=Path, metavar="SCRIPT", help="the program that is to run"
    )
    made.add_argument(
        "-n",
        "--ranks",
        type=_count,
        default=0,
        help="number of ranks on this machine. Default: the launcher's, or that of sdp run",
    )
    made.add_argument(
        "--no-speed", action="store_true", help="do not measure, which takes about 10 s"
    )
    made.add_argument("--all", action="store_true", help="also show what is well, or was skipped")
    made.add_argument("--json", action="store_true", help="print a report for programs and bugs")
    made.add_argument(
        "--check",
        action="append",
        choices=sorted(all_checks.NAMES),
        metavar="NAME",
        help="run only this check, and do not measure; may be repeated",
    )
    hosts = made.add_mutually_exclusive_group()
    hosts.add_argument(
        "--hosts", metavar="a,b", help="look at these hosts, too, by ssh; as for sdp run"
    )
    hosts.add_argument("--hostfile", type=Path, metavar="FILE", help="the same in a file")
    made.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long another host may take; the measurement may take half of it (default: 60)",
    )
    return made


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError("it is a whole number above 0")
    return int(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_TIMEOUT_S:
        raise ValueError
    return value


def main(arguments: Sequence[str]) -> int:
    """The command."""
    command = parser()
    options = command.parse_args(arguments)
    if options.script and not options.script.exists():
        command.error(f"there is no script {options.script}")
    try:
        hosts = _hosts(options)
    except LaunchError as failed:
        command.error(str(failed))
    try:
        report = _report(options, hosts)
        if options.json:
            print(json.dumps(report.as_json(), indent=2), flush=True)
        else:
            show(report, options.all)
            sys.stdout.flush()
    except BrokenPipeError:
        return closed_pipe.exit_code()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as failed:  # such as a full disk
        print(f"sdp doctor: {failed}", file=sys.stderr)
        closed_pipe.discard_output()
        return 1
    return report.exit_code


def _hosts(options: argparse.Namespace) -> tuple[str, ...]:
    if options.hosts is None and options.hostfile is None:
        return ()
    found = parse_hostfile(options.hostfile) if options.hostfile else parse_hosts(options.hosts)
    return tuple(placed(found, None))


def _report(options: argparse.Namespace, hosts: tuple[str, ...]) -> Report:
    machine = Machine(script=options.script, given_ranks=options.ranks, hosts=hosts)
    only = options.check or ()
    speed_s = 0.0 if options.no_speed or only else options.timeout / 2
    own = examine(machine, speed_s, only)
    if not hosts:
        return own
    with announced(f"sdp doctor: asking {len(hosts)} hosts"):
        answers = ask_hosts(machine, own, only, speed_s, options.timeout)
    findings = [*across_hosts.compare(own, answers), *own.findings]
    others = [answer.report for answer in answers if answer.report and not answer.is_here]
    sentence = own.verdict and verdict(findings, own.speed)
    return replace(own, findings=findings, verdict=sentence, hosts=others)
