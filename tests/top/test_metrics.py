"""Metrics for Prometheus: of `sdp top`, and of the launcher."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from unittest import mock

import pytest

from sdp_plugins.top import metrics
from tests.ranks import HANG_S, Start
from tests.top.cases import BYTES, going, sampling_of, train, watch_of

prometheus = pytest.importorskip("prometheus_client.parser")
Samples = dict[tuple[str, str], float]
TOTALS = ("operations", "bytes", "communication_seconds", "waiting_seconds", "last_arrivals")


def scrape(url: str, group: str) -> Samples:
    """The samples of a group, by name and rank."""
    with urllib.request.urlopen(url, timeout=HANG_S) as answer:
        text = answer.read().decode()
    families = {family.name: family for family in prometheus.text_string_to_metric_families(text)}
    assert all(family.documentation for family in families.values())
    kinds = {name: family.type for name, family in families.items()}
    assert kinds.pop("sdp_running_seconds") == "gauge" and set(kinds.values()) == {"counter"}
    return {
        (sample.name, sample.labels["rank"]): sample.value
        for family in families.values()
        for sample in family.samples
        if sample.labels["group"] == group
        if set(sample.labels) == {"job", "group", "rank"}
    }


def test_counters_grow(start_pooled: Start) -> None:
    with start_pooled(2, train, 1) as ranks:
        going(ranks)
        watch = watch_of(ranks)
        with metrics.served(watch.read, "127.0.0.1", 0) as url:
            first = scrape(url, "seen")
            time.sleep(1)
            second = scrape(url, "seen")
    for name in TOTALS:
        growth = {r: second[key] - first[key] for r in "01" if (key := (f"sdp_{name}_total", r))}
        assert all(more >= 0 for more in growth.values()) and any(growth.values()), name
    operations = second["sdp_operations_total", "0"]
    assert second["sdp_bytes_total", "0"] == pytest.approx(operations * BYTES, rel=0.1)
    waited = {r: second["sdp_waiting_seconds_total", r] for r in "01"}
    awaited = {r: second["sdp_awaited_seconds_total", r] for r in "01"}
    assert waited["0"] > 2 * waited["1"] and awaited["1"] > 2 * awaited["0"]


def test_nothing_to_read_is_no_error(start_pooled: Start) -> None:
    with start_pooled(2, train, 1) as ranks:
        going(ranks)
        sampling = sampling_of(ranks)
        with metrics.served(sampling.latest, "127.0.0.1", 0) as url:
            assert scrape(url, "seen") == {}
            sampling.read()
            assert scrape(url, "seen")


def status(url: str, host: str) -> int:
    """The answer to a request that names a host."""
    request = urllib.request.Request(url, headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        refused.close()
        return refused.code


def test_other_hosts_names_are_refused_on_a_loopback_address() -> None:
    with metrics.served(list, "127.0.0.1", 0) as url:
        assert [status(url, host) for host in ("127.0.0.1:1", "localhost", "[::1]:1")] == [200] * 3
        strange = ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "")
        assert [status(url, host) for host in strange] == [403] * 4
    with metrics.served(list, "0.0.0.0", 0) as url:
        assert status(url, "node7.example:9400") == 200


def test_an_ipv6_address() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    with metrics.served(list, "::1", 0) as url:
        assert re.fullmatch(r"http://\[::1\]:\d+/metrics", url)
        with urllib.request.urlopen(url, timeout=HANG_S) as answer:
            assert answer.status == 200


def test_a_missing_package_is_named() -> None:
    with (
        mock.patch.dict(sys.modules, {"prometheus_client": None}),
        pytest.raises(ModuleNotFoundError, match="Hint: pip install 'prometheus-client"),
        metrics.served(list, "127.0.0.1", 0),
    ):
        pass


SCRIPT = """
import time, numpy
from sdp_plugins.core import Group
with Group.from_env(name="launched") as group:
    data, end = numpy.ones(100), time.monotonic() + 60
    while True:
        group.all_reduce(data)
        time.sleep(0.01)
"""


def test_the_launcher_serves_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    line = [sys.executable, "-m", "sdp_plugins.launch", "run", "-n", "2", "--metrics-port", "0"]
    with subprocess.Popen(
        [*line, str(tmp_path / "script.py")], stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            assert job.stderr is not None
            said = re.fullmatch(r"sdp run: metrics: (http://\S+)\n", job.stderr.readline())
            assert said and said[1].startswith("http://127.0.0.1:")
            end = time.monotonic() + HANG_S
            while not (found := scrape(said[1], "launched")) and time.monotonic() < end:
                time.sleep(0.1)
            assert {rank for _, rank in found} == {"0", "1"}
            port = said[1].split(":")[2].split("/")[0]
            again = subprocess.run(
                [*line[:-1], port, str(tmp_path / "script.py")],
                capture_output=True,
                text=True,
                check=False,
                timeout=HANG_S,
            )
            assert again.returncode == 2 and "Address already in use" in again.stderr
        finally:
            job.terminate()
            job.communicate(timeout=HANG_S)
        assert job.returncode == 128 + 15


def test_ranks_on_hosts_are_read_there(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    line = [sys.executable, "-m", "sdp_plugins.launch", "run", "--hosts", "a:2"]
    done = subprocess.run(
        [*line, "--metrics-port", "0", str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 2 and "sdp top --metrics-port" in done.stderr
