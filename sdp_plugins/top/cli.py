"""The command `sdp top`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing

from sdp_plugins.flight import closed_pipe
from sdp_plugins.flight.choice import NoSuchJobError, job_here
from sdp_plugins.top.job_watch import JobWatch
from sdp_plugins.top.plain_text import lines_of
from sdp_plugins.top.sampling import Sampling
from sdp_plugins.top.screen import Screen

_NICENESS = 5
_LEAST_S = 0.05


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="sdp top",
        description="Shows what the ranks of a running job do, and which of them the others wait "
        "for. Reads their shared memory; the ranks do nothing for it. q or Ctrl-C leaves.",
    )
    made.add_argument(
        "job",
        nargs="?",
        default="",
        metavar="JOB",
        help="key of a job or part of it; pid of a rank or of its launcher. Default: the only job "
        "on this machine",
    )
    made.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="default: 1"
    )
    made.add_argument(
        "--once",
        action="store_const",
        const=1,
        dest="count",
        help="print one sample as text, and leave",
    )
    made.add_argument(
        "--count",
        type=_count,
        metavar="N",
        help="print N samples as text, and leave. Without a terminal, samples are printed as text "
        "until the job ends",
    )
    _add_servers(made)
    return made


def _add_servers(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--serve",
        type=_port,
        nargs="?",
        const=0,
        metavar="PORT",
        help="also show the job on a page at this port of 127.0.0.1. Default: a free port",
    )
    made.add_argument(
        "--metrics-port",
        type=_port,
        metavar="PORT",
        help="also serve metrics for Prometheus at this port of 127.0.0.1",
    )
    made.add_argument(
        "--metrics-address",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="serve the metrics at this address instead; anyone who reaches it can read them",
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not _LEAST_S <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: at least {_LEAST_S} s")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"{text}: no such port")
    return value


def main(arguments: Sequence[str]) -> int:
    """The command."""
    options = parser().parse_args(arguments)
    try:
        watch = JobWatch(job_here(options.job))
        os.nice(_NICENESS)  # the ranks go first
        with ExitStack() as servers:
            sampling = Sampling(watch, options.interval)
            notes = _serve(options, sampling, servers)
            ended = _show(options, sampling, notes)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        return closed_pipe.exit_code()
    except (NoSuchJobError, OSError, ModuleNotFoundError) as error:
        print(f"sdp top: {error}", file=sys.stderr)
        return 1
    if ended:
        print(f"sdp top: {ended}", flush=True)
    return 0


def _serve(options: argparse.Namespace, sampling: Sampling, servers: ExitStack) -> list[str]:
    """Start the servers that were asked for; returns a line about each."""
    notes = []
    if options.serve is not None:
        from sdp_plugins.top.page_server import PageServer

        page = servers.enter_context(closing(PageServer(sampling, options.serve)))
        notes.append(f"page: {page.url}")
    if options.metrics_port is not None:
        from sdp_plugins.top.metrics import served

        place = options.metrics_address, options.metrics_port
        url = servers.enter_context(served(sampling.latest, *place))
        notes.append(f"metrics: {url}")
    return notes


def _show(options: argparse.Namespace, sampling: Sampling, notes: list[str]) -> str:
    """Show the job until it ends; returns why, or nothing if the user leaves."""
    for note in notes:  # the terminal shows them again when the user leaves
        print(note, flush=True)
    if not options.count and sys.stdin.isatty() and sys.stdout.isatty():
        with Screen(sampling, notes) as screen:
            return screen.run(options.interval)
    for number, _ in enumerate(_readings(sampling, options.interval), 1):
        if options.count or not notes:  # else it is there to serve
            print("\n".join(lines_of(sampling.view())), flush=True)
        if number == options.count:
            return ""
    return sampling.ended


def _readings(sampling: Sampling, interval_s: float) -> Iterator[None]:
    """Read at every interval, until the job ends; the first reading is only compared with."""
    sampling.read()
    due = time.monotonic()
    while not sampling.ended:
        due = max(due + interval_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        sampling.read()
        if not sampling.ended:
            yield
