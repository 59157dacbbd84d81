"""The parts of `gpu` that check and measure single operations."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.gpu import hardware
from benchmarks.gpu.bench import RANK_TIMEOUT_S, Bench, medians, slowest
from benchmarks.gpu.document import WRONG, Section
from benchmarks.gpu.plan import GLOO
from benchmarks.job import Job, JobError, JobSpec
from benchmarks.runner import condense
from benchmarks.units import format_size, format_time

CHECK_LIMIT_S = 80.0
SHOWN = 3  # cases that a table names


def correctness(bench: Bench, section: Section) -> None:
    """Compare device tensors with CPU tensors bit by bit, and DDP over smddp with DDP over gloo."""
    section.columns = ("check", "variant", "same bits", "refused on both", "wrong")
    check = bench.plan.check
    sizes = {"small": check["small"], "large": check["large"]}
    checks: dict[str, tuple[str, Mapping[str, Any]]] = {
        "all_reduce": ("all_reduces", {**sizes, "strided": False}),
        "all_reduce, strided": ("all_reduces", {**sizes, "strided": True}),
        "others": ("collectives", {"sizes": check["parts"]}),
        "streams": ("streams", {"count": 2**18, "busy": check["busy"], "repeats": 3}),
    }
    for variant in bench.plan.ours:
        for name, (function, arguments) in checks.items():
            bench.progress(f"checking {name}, {variant}")
            try:
                target = f"correctness:{function}"
                found = bench.call(variant, target, within_s=CHECK_LIMIT_S, **arguments)
            except JobError as failure:
                section.error += f"{name}, {variant}: {failure}\n"
                continue
            section.data[f"{name}, {variant}"] = found
            section.rows.append((name, variant, *_verdict(section, variant, found)))
            if section.rows[-1][-1] != "0":
                bench.restart(variant)  # its group may have failed
        _ddp(bench, section, variant)


def _verdict(section: Section, variant: str, ranks: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the cells of a check, and name what is wrong."""
    for number, rank in enumerate(ranks):
        if rank["wrong"]:
            texts = rank["wrong"][:SHOWN]
            section.remarks += [f"{WRONG}, {variant}, rank {number}: {text}" for text in texts]
            break  # the other ranks' are alike
    first, wrong = ranks[0], sum(len(rank["wrong"]) for rank in ranks)
    return (str(first["equal"]), str(len(first["refused"])), str(wrong))


def _ddp(bench: Bench, section: Section, variant: str) -> None:
    bench.progress(f"checking DDP, {variant}")
    arguments = {"steps": 4, "width": bench.plan.check["width"]}
    try:
        found = bench.call(variant, "correctness:ddp_like_gloo", **arguments)
    except JobError as failure:
        section.error += f"DDP, {variant}: {failure}\n"
        return
    section.data[f"DDP, {variant}"] = found
    agree = len({rank["weights"] for rank in found}) == 1
    equal = all(rank["equal"] for rank in found)
    section.rows.append(("DDP", variant, str(int(equal)), "0", str(int(not (equal and agree)))))
    if not (equal and agree):
        most = max(rank["largest_difference"] for rank in found)
        section.remarks.append(
            f"{WRONG}, {variant}: DDP differs from gloo by up to {most:g}; ranks "
            f"{'agree' if agree else 'differ'} (above two ranks the order of sums may differ)"
        )


def floor(bench: Bench, section: Section) -> None:
    """Measure what bounds a staged reduction: the copies, and the core's reduction on the host."""
    plan = bench.plan
    section.columns = ("what", "memory", format_size(plan.bucket), "GB/s of a rank")
    arguments = {"nbytes": plan.bucket, "calls": plan.calls, "rounds": plan.rounds}
    for kind in ("pinned", "registered"):
        bench.progress(f"copies, {kind} memory")
        try:
            ranks = bench.call(plan.base, f"copies:{kind}", **arguments)
        except JobError as failure:
            section.error += f"{kind}: {failure}\n"
            continue
        found = {name: slowest(rank.get(name, 0.0) for rank in ranks) for name in ranks[0]}
        section.data[kind] = found
        for name, us in found.items():
            section.rows.append((name, kind, format_time(us), rate(plan.bucket, us)))
    if plan.device == "cuda":
        bench.document.machine.update(hardware.gpu())  # an idle link may have been slower
    section.data["core"] = {}
    for threads in plan.core_threads:
        bench.progress(f"core, {threads} engine threads")
        try:
            us = _core_us(bench, threads)
        except JobError as failure:
            section.error += f"core, {threads} threads: {failure}\n"
            continue
        section.data["core"][str(threads)] = us
        what = f"core's all_reduce, {threads} engine threads"
        section.rows.append((what, "shared", format_time(us), rate(plan.bucket, us)))
    section.remarks.append("down: from the device to the host; the slowest rank's time")
    section.remarks.append(_floor_remark(bench, section.data))


def _core_us(bench: Bench, threads: int) -> float:
    """Return the microseconds of the core's all_reduce, in ranks without torch."""
    plan, left = bench.plan, bench.remaining_s
    task = "benchmarks.collective:CollectiveTask"
    arguments = {"target": "benchmarks.libraries.core:Core", "options": {}}
    environment = {"SDP_ENGINE_THREADS": str(threads), "SDP_TIMEOUT_S": RANK_TIMEOUT_S}
    with Job(JobSpec("core", task, plan.ranks, arguments, 1, environment)) as job:
        prepared = {"operation": "all_reduce", "dtype": "float32", "count": plan.bucket // 4}
        job.call("prepare", prepared, left())
        bursts = [
            condense(job.call("burst", {"iterations": plan.calls}, left()))
            for _ in range(plan.rounds)
        ]
    return median(bursts)


def floor_us(data: Mapping[str, Any], nbytes: int, bucket: int) -> float | None:
    """Return the time below which no pipeline of copies and reduction gets, if it was measured."""
    copies = data.get("registered") or data.get("pinned") or {}
    bounds = [*copies.values()][-1:] + sorted(data.get("core", {}).values())[:1]
    return max(bounds) * nbytes / bucket if bounds else None


def _floor_remark(bench: Bench, data: Mapping[str, Any]) -> str:
    us = floor_us(data, bench.plan.bucket, bench.plan.bucket)
    return (
        f"floor: {format_time(us or 0.0)}, the longer of all ranks' copies down and up at once, "
        "and of the core's fastest reduction"
    )


def reductions(bench: Bench, section: Section) -> None:
    """Measure all_reduce of device tensors, alternating between the variants."""
    plan = bench.plan
    section.columns = (
        *("size", "variant", "one call", "GB/s", "of several in flight", "GB/s"),
        *("floor / in flight", "x gloo, one", "x gloo, in flight"),
    )
    floor_data = bench.document.find("floor")
    for nbytes in plan.sizes:
        calls = max(2, min(plan.calls, plan.calls * plan.bucket // nbytes))
        found: dict[str, dict[str, float]] = {}
        for way in ("one_by_one", "in_flight"):

            def turn(variant: str, way: str = way, nbytes: int = nbytes, calls: int = calls) -> Any:
                return slowest(bench.call(variant, f"calls:{way}", nbytes=nbytes, calls=calls))

            rounds = bench.alternate(plan.variants, turn, section)
            section.data[f"{nbytes} {way}"] = rounds
            found[way] = medians(rounds)
        lowest = floor_us(floor_data, nbytes, plan.bucket)
        for variant in plan.variants:
            one, many = (found[way].get(variant) for way in ("one_by_one", "in_flight"))
            if one and many:
                gloos = [found[way].get(GLOO) for way in ("one_by_one", "in_flight")]
                section.rows.append(
                    (
                        *(format_size(nbytes), variant),
                        *(format_time(one), rate(nbytes, one)),
                        *(format_time(many), rate(nbytes, many)),
                        f"{lowest / many:.2f}" if lowest else "-",
                        *(
                            f"{g / us:.2f}" if g else "-"
                            for g, us in zip(gloos, (one, many), strict=True)
                        ),
                    )
                )
    section.remarks.append(
        f"medians of {plan.rounds} alternating rounds, the slowest rank's; "
        f"{plan.threads} engine threads per rank"
    )
    bench.free()


def host(bench: Bench, section: Section) -> None:
    """Measure how long the host is held up by a call and by wait()."""
    plan = bench.plan
    section.columns = ("variant", "in the call", "in wait()", "then until the end")
    arguments = {"nbytes": plan.bucket, "calls": plan.calls}
    for variant in plan.variants:
        bench.progress(f"host times, {variant}")
        try:
            ranks = bench.call(variant, "calls:host_times", **arguments)
        except JobError as failure:
            section.error += f"{variant}: {failure}\n"
            continue
        section.data[variant] = ranks
        times = [slowest(rank[name] for rank in ranks) for name in ("call", "wait", "rest")]
        section.rows.append((variant, *(format_time(us) for us in times)))
    section.remarks.append(f"all_reduce of {format_size(plan.bucket)}, async_op=True")


def rate(nbytes: int, us: float) -> str:
    """Return the GB/s of moving bytes once."""
    return f"{nbytes / us / 1e3:.3g}" if us else "-"
