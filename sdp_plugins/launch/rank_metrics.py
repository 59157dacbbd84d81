"""Metrics of the ranks of this launcher's job, for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import typer

from sdp_plugins.launch.who_waits import own_jobs

if TYPE_CHECKING:
    from sdp_plugins.flight.rank_snapshot import RankSnapshot

# Functions import what only jobs with metrics need.


def serve_metrics(servers: ExitStack, address: str, port: int) -> None:
    """Serve them until `servers` closes, and print where.

    Raises:
        typer.BadParameter: A package is missing, or the port is in use.
    """
    from sdp_plugins.top.metrics import served

    try:
        url = servers.enter_context(served(_snapshots, address, port))
    except (ModuleNotFoundError, OSError) as error:
        raise typer.BadParameter(f"--metrics-port {port}: {error}") from None
    typer.echo(f"sdp run: metrics: {url}", err=True)


def _snapshots() -> Sequence[RankSnapshot]:
    from sdp_plugins.flight.rank_snapshot import latest

    return latest(snapshot for job in own_jobs() for snapshot in job.snapshots)
