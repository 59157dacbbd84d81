"""Sizes, rates, closed forms and verdicts: what needs no ranks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks import machine, targets, values
from benchmarks.all_reduce import algbw_gbps, busbw_gbps
from benchmarks.footprint import footprint
from benchmarks.libraries import LIBRARIES, select
from benchmarks.memory import JobMemory, MemoryReport, system_shmem
from benchmarks.results import Measurement, Report, alternate, step_us
from benchmarks.runner import condense
from benchmarks.units import format_size, format_time, parse_list, parse_size

MIB = 2**20


def report_of(*measurements: Measurement) -> Report:
    settings = {"ranks": 2, "threads": 1, "rounds": 3}
    return Report("all_reduce", settings, {"cpu": "x", "cores": 2}, list(measurements))


def took(library: str, us: float, nbytes: int = MIB, dtype: str = "float32") -> Measurement:
    case = {"operation": "all_reduce", "dtype": dtype, "nbytes": nbytes, "ranks": 2}
    return Measurement(library, (us * 2, us, us / 2), case, {"path": ""})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("4K", 4096), ("25M", 25 * MIB), ("1GiB", 2**30), (" 3 kb", 3072)],
)
def test_sizes_are_binary(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "4T", "-1", "1.5M", "K"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_lists_take_spaces_and_empty_items():
    assert parse_list(" a, b,,c ") == ["a", "b", "c"]


@pytest.mark.parametrize(("load", "warned"), [(0.4, False), (1.2, True)])
def test_a_busy_machine_is_told(monkeypatch, load, warned):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("os.getloadavg", lambda: (load, 9.0, 9.0))
    assert bool(machine.busy()) == warned


def test_formats():
    assert [format_size(n) for n in (100, 4096, 25 * MIB, 2**30)] == [
        "100 B",
        "4 KiB",
        "25 MiB",
        "1 GiB",
    ]
    times = (0.36, 13.24, 101.4, 999.7, 4710.0, 123456.0)
    assert [format_time(t) for t in times] == [
        "0.360 us",
        "13.2 us",
        "101 us",
        "1.00 ms",
        "4.71 ms",
        "123 ms",
    ]


@pytest.mark.parametrize(("ranks", "factor"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75)])
def test_bus_bandwidth_is_that_of_nccl_tests(ranks, factor):
    m = Measurement("gloo", (1000.0,), {"nbytes": 10**6, "ranks": ranks})
    assert algbw_gbps(m) == pytest.approx(1.0)  # 1e6 bytes in 1 ms
    assert busbw_gbps(m) == pytest.approx(factor)


def test_a_round_is_the_median_of_the_ranks_mean():
    rank0, rank1 = [1000, 3000, 900_000], [2000, 5000, 100_000]
    assert condense([rank0, rank1]) == pytest.approx(4.0)


def test_variants_take_turns_and_steps_are_means_over_ranks():
    turns: list[str] = []

    def turn(name):
        turns.append(name)
        return float(len(turns))

    assert alternate("ab", 2, turn, lambda text: None) == {"a": (1.0, 3.0), "b": (2.0, 4.0)}
    assert turns == ["a", "b", "a", "b"]
    assert step_us([[9.0, 1e-3, 3e-3, 2e-3], [9.0, 3e-3, 5e-3, 4e-3]], 1) == pytest.approx(3000)


def test_a_measurement_is_the_median_of_its_rounds():
    m = took("gloo", 100.0)
    assert m.us == 100.0
    assert report_of(m, took("smddp", 10.0)).speedup(took("smddp", 10.0)) == pytest.approx(10)
    assert report_of().speedup(m) is None


def test_json_has_all_fields_and_survives_a_round_trip():
    report = report_of(took("gloo", 100.0), took("smddp", 8.0))
    data = json.loads(json.dumps(report.to_json()))
    assert data["schema"] == 2
    assert set(data) == {
        "schema",
        "operation",
        "settings",
        "machine",
        "facts",
        "versions",
        "skipped",
        "measurements",
    }
    entry = data["measurements"][1]
    assert entry == {
        "variant": "smddp",
        "operation": "all_reduce",
        "dtype": "float32",
        "nbytes": MIB,
        "ranks": 2,
        "rounds_us": [16.0, 8.0, 4.0],
        "us": 8.0,
        "times_gloo": 12.5,
        "path": "",
    }


@pytest.mark.parametrize("dtype", values.DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 6, 1000])
def test_the_closed_form_is_what_repeated_sums_give(dtype, ranks, count):
    buffers = [np.zeros(count, values.storage(dtype)) for _ in range(ranks)]
    for rank, buffer in enumerate(buffers):
        values.fill(buffer, dtype, rank)
    times = min(values.run_length(dtype, ranks), 12)
    for n in range(1, times + 1):
        buffers = [add(buffers, dtype)] * ranks
        values.check(buffers[0], dtype, ranks, n)
    assert np.isfinite(values.decode(buffers[0], dtype)).all()


def add(buffers, dtype):
    """A rank-order sum, rounded once, in place of an all_reduce."""
    if dtype == "bfloat16":
        wide = sum(values.decode(b, dtype) for b in buffers).astype(np.float32).view(np.uint32)
        return ((wide + 0x8000) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        kind = np.float64 if dtype == "float16" else None
        return np.sum(buffers, axis=0, dtype=kind or buffers[0].dtype).astype(buffers[0].dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_a_run_stays_among_normal_numbers(dtype, ranks):
    length = values.run_length(dtype, ranks)
    assert length >= 2
    info = {"bfloat16": np.finfo(np.float32)}.get(dtype) or np.finfo(values.storage(dtype))
    largest = 5 * ranks * ranks ** (length - 1)
    start = values._scaled(dtype, 1)
    assert start >= float(info.tiny)
    assert math.log2(largest) + math.log2(start) <= math.log2(float(info.max))


@pytest.mark.parametrize("dtype", values.DTYPES)
def test_one_wrong_element_is_found_and_named(dtype):
    buffer = np.zeros(1000, values.storage(dtype))
    values.fill(buffer, dtype, 0)
    values.check(buffer, dtype, 1, 1)
    buffer[637] += 1
    with pytest.raises(ArithmeticError, match="element 637"):
        values.check(buffer, dtype, 1, 1)


def test_nan_is_wrong():
    buffer = np.zeros(8, np.float32)
    values.fill(buffer, "float32", 0)
    buffer[3] = np.nan
    with pytest.raises(ArithmeticError, match="element 3"):
        values.check(buffer, "float32", 1, 1)


def test_peers_are_selected_in_order_and_once():
    assert [p.name for p in select(["smddp", "gloo", "smddp"])] == ["smddp", "gloo"]
    names = [p.name for p in select(["gloo", "smddp", "core"], registered=False)]
    assert names == ["gloo", "smddp-unregistered", "core-unregistered"]
    assert LIBRARIES["smddp-unregistered"].environment == {"SDP_REGISTER": "0"}
    with pytest.raises(ValueError, match=r"nccl.*there are gloo"):
        select(["nccl"])


def test_verdicts():
    found = targets.Findings(
        report_of(took("gloo", 100.0), took("smddp", 8.0), took("mpich", 30.0)), "float32", MIB
    )
    assert found.faster("w", "smddp", ["gloo"], 12, "gloo").reached is True
    assert found.faster("w", "smddp", ["gloo"], 13, "gloo").reached is False
    best = found.faster("w", "smddp", ["mpich", "openmpi"], 3, "MPI")
    assert best.reached is True
    assert best.measured == "8.00 us: 3.75 x mpich"
    missed = targets.Findings(
        report_of(took("gloo", 95.97), took("smddp", 8.0)), "float32", MIB
    ).faster("w", "smddp", ["gloo"], 12, "gloo")
    assert (missed.reached, missed.measured) == (False, "8.00 us: 11.99 x gloo")
    assert found.faster("w", "smddp", ["openmpi"], 1, "MPI").reached is None
    assert found.at_most("w", "smddp", 8).reached is True
    assert found.at_most("w", "smddp", 7.9).reached is False
    missed = found.at_most("w", "smddp", 7.999)
    assert (missed.reached, missed.measured) == (False, "over 8.00 us")
    assert found.at_most("w", "core", 7.9).reached is None
    assert found.others("smddp") == "gloo 100 us, mpich 30.0 us"


def test_memory_is_compared_per_rank():
    here = footprint()
    assert here.rss >= here.pss > 0
    assert here.pss >= here.pss_shmem >= 0
    assert system_shmem() >= 0
    more = type(here)(here.rss, here.pss + 3 * MIB, here.pss_shmem)
    first, second = JobMemory("gloo", (here, here), 0), JobMemory("smddp", (here, more), 0)
    report = MemoryReport({}, (first, second))
    assert report.beyond_first(second, "pss") == pytest.approx(1.5 * MIB)
    assert report.beyond_first(first, "pss") == 0
