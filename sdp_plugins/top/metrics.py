"""Serves what ranks have counted to Prometheus; ranks are read when it asks."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from sdp_plugins.core.counters import Counters
from sdp_plugins.flight.rank_snapshot import RankSnapshot
from sdp_plugins.flight.rank_state import rank_state

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Read = Callable[[], Sequence[RankSnapshot]]
Application = Callable[[dict[str, Any], Callable[..., object]], Iterable[bytes]]  # of WSGI
Labels = tuple[str, str, str]

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_LABELS = ("job", "group", "rank")
_COUNTERS: dict[str, tuple[str, Callable[[Counters], float]]] = {
    "sdp_operations": (
        "Collectives, sends and receives that have completed.",
        lambda counted: counted.operations + counted.messages,
    ),
    "sdp_bytes": (
        "Bytes that they moved: of each, what the rank gave or took, whichever is more.",
        lambda counted: counted.nbytes + counted.message_nbytes,
    ),
    "sdp_communication_seconds": (
        "Time in collectives that have completed; the program may have computed meanwhile.",
        lambda counted: counted.busy_ns / 1e9,
    ),
    "sdp_waiting_seconds": (
        "The part of it in which ranks of this node had yet to begin the collective.",
        lambda counted: counted.waiting_ns / 1e9,
    ),
    "sdp_last_arrivals": (
        "Collectives that this rank was the last of its node to begin.",
        lambda counted: counted.last_arrivals,
    ),
    "sdp_awaited_seconds": (
        "Time for which the first rank of the node waited for this one, when it was the last.",
        lambda counted: counted.awaited_ns / 1e9,
    ),
}


@contextmanager
def served(read: Read, address: str, port: int) -> Iterator[str]:
    """Serve metrics in this block, from a thread of its own; returns their address.

    Raises:
        ModuleNotFoundError: prometheus-client is not installed.
        OSError: The port is in use.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "metrics need prometheus-client. Hint: pip install 'prometheus-client>=0.20,<1'"
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RankCollector(read))
    # Signals go to the main thread, which waits for them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        server, thread = start_http_server(port, address, registry)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    shown = f"[{address}]" if ":" in address else address
    if ip_address(server.server_address[0]).is_loopback:
        server.set_app(_for_hosts({*_LOOPBACK, shown}, server.get_app()))
    try:
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _for_hosts(names: Collection[str], app: Application) -> Application:
    """Refuse the names of other sites, which a page in a browser may have resolved to this host."""

    def checked(request: dict[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
        if re.sub(r":\d*$", "", request.get("HTTP_HOST", "")) in names:
            return app(request, start)
        start("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"the Host header is not of this machine's loopback address"]

    return checked


class _RankCollector:
    """Makes Prometheus' metrics of what ranks show."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshots = self._read()
        counted = _counted(snapshots)
        for name, (text, value) in _COUNTERS.items():
            family = CounterMetricFamily(name, text, labels=_LABELS)
            for labels, counters in counted.items():
                family.add_metric(labels, value(counters))
            yield family
        running = GaugeMetricFamily(
            "sdp_running_seconds",
            "Time since the rank began the collective that runs now; 0: none runs.",
            labels=_LABELS,
        )
        for labels, seconds in _running_s(snapshots).items():
            running.add_metric(labels, seconds)
        yield running


def _labels(snapshot: RankSnapshot) -> Labels:
    info = snapshot.info
    return info.job, info.name, str(info.global_rank)


def _counted(snapshots: Sequence[RankSnapshot]) -> dict[Labels, Counters]:
    """By labels: groups of one rank that have the same name count together."""
    found: dict[Labels, Counters] = {}
    for snapshot in snapshots:
        before = found.get(_labels(snapshot), Counters())
        pairs = zip(before, snapshot.counters, strict=True)
        found[_labels(snapshot)] = Counters._make(a + b for a, b in pairs)
    return found


def _running_s(snapshots: Sequence[RankSnapshot]) -> dict[Labels, float]:
    found: dict[Labels, float] = {}
    for snapshot in snapshots:
        current = rank_state(snapshot, snapshot.read_ns).current
        seconds = (snapshot.read_ns - current.started) / 1e9 if current else 0.0
        labels = _labels(snapshot)
        found[labels] = max(found.get(labels, 0.0), seconds)
    return found
