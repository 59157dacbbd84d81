"""The parts of `gpu` that measure computation beside communication."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.gpu.bench import Bench, Part, medians, slowest
from benchmarks.gpu.document import Section
from benchmarks.gpu.parts import correctness, floor, host, reductions
from benchmarks.gpu.plan import GLOO, NONE, slug
from benchmarks.job import JobError
from benchmarks.units import format_size, format_time

BUCKETS = 12
FULL = 1.6  # times as long as half the batch
OF_A_TRACE = (
    "of a trace: the share of the time between the first byte that leaves the device and the last "
    "that is back in which kernels run, in a profile of three steps of rank 0 by torch"
)
STEPS, DEEP = "steps", "steps_deep"


def products(bench: Bench, section: Section) -> None:
    """Measure matrix products alone and beside reductions."""
    measure_products(bench, section, bench.plan.variants)


def measure_products(bench: Bench, section: Section, variants: list[str]) -> None:
    """Measure matrix products on rank 0, over some variants."""
    plan = bench.plan
    side, seconds = plan.matmul
    section.columns = ("variant", "alone, per s", "beside, per s", "slow-down", "reductions per s")
    calls: dict[str, int] = {}
    rates: dict[str, dict[str, list[float]]] = {}

    def turn(variant: str) -> float:
        if variant not in calls:
            once = bench.call(variant, "calls:one_by_one", nbytes=plan.bucket, calls=2)
            calls[variant] = max(2, int(seconds * 1e6 / slowest(once)))
        alone = bench.call(variant, "matmuls:alone", side=side, seconds=seconds)[0]
        arguments: dict[str, Any] = {"side": side, "nbytes": plan.bucket, "calls": calls[variant]}
        both = bench.call(variant, "matmuls:with_reductions", **arguments)
        kept = rates.setdefault(variant, {"alone": [], "beside": [], "reductions": []})
        kept["alone"].append(alone["products_per_s"])
        kept["beside"].append(both[0]["products_per_s"])
        kept["reductions"].append(both[0]["reductions_per_s"])
        return kept["alone"][-1] / max(kept["beside"][-1], 1e-9)

    slower = medians(bench.alternate(variants, turn, section))
    section.data = {"slower": slower, "rates": rates}
    for variant, times in slower.items():
        alone, beside, reduced = medians(rates[variant]).values()
        section.rows.append(
            (variant, f"{alone:.0f}", f"{beside:.0f}", f"{times:.2f} x", f"{reduced:.1f}")
        )
    section.remarks.append(
        f"bf16 products of {side} x {side} on rank 0, while the others only reduce; reductions of "
        f"{format_size(plan.bucket)}, one after another, in another thread and stream"
    )


def steps(bench: Bench, section: Section, model: str = "model") -> None:
    """Measure a training step under DDP: without communication, over smddp, over gloo.

    Args:
        bench: The run.
        section: Takes the results.
        model: The plan's field that has the model.
    """
    plan = bench.plan
    section.columns = ("variant", "ms per step", "time of none", "x gloo")
    setting = find_setting(bench, section, getattr(plan, model))
    variants = (NONE, *plan.variants)

    def turn(variant: str) -> float:
        job = plan.base if variant == NONE else variant
        reduce = variant != NONE
        target = "training:step_us"
        return slowest(bench.call(job, target, setting=setting, steps=plan.steps, reduce=reduce))

    rounds = bench.alternate(variants, turn, section)
    found = medians(rounds)
    section.data |= {"rounds": rounds, "us": found}
    for variant, us in found.items():
        cells = [
            f"{us / found[NONE]:.3f} x" if NONE in found else "-",
            f"{found[GLOO] / us:.2f}" if GLOO in found else "-",
        ]
        section.rows.append((variant, f"{us / 1e3:.2f}", *cells))
    section.remarks.append(
        f"BERT of {setting['model']}, batch {setting['rows']} x {plan.tokens} per rank, float32, "
        f"SGD, DDP's defaults; backward pass alone {section.data['backward_us'] / 1e3:.1f} ms; "
        f"medians of {plan.rounds} alternating rounds of {plan.steps} steps"
    )


def find_setting(
    bench: Bench, section: Section, model: Mapping[str, int], alone: bool = False
) -> dict[str, Any]:
    """Return a workload whose backward pass is as long as the plan says, and fills the device.

    Where half as many rows take nearly as long, it is the host that takes the time.
    """
    plan, rows, half_us = bench.plan, 1, 0.0
    while True:
        setting = {"rows": rows, "tokens": plan.tokens, "model": dict(model)}
        bench.progress(f"backward pass of {rows} rows")
        given: dict[str, Any] = {"setting": setting, "repeats": 3, "alone": alone}
        us = slowest(bench.call(plan.base, "training:backward_us", **given))
        section.data |= {"setting": setting, "backward_us": us}
        is_full = us >= 1e3 * plan.backward_ms and us >= FULL * half_us
        if is_full or 2 * rows > plan.rows:
            return setting
        rows, half_us = 2 * rows, us


def hidden(bench: Bench, section: Section, of: str = STEPS) -> None:
    """Measure which share of the communication a step hides, also in a profile.

    Args:
        bench: The run.
        section: Takes the results.
        of: The part that has measured the steps.
    """
    section.columns = ("variant", "alone", "exposed", "hidden", "hidden, of a trace")
    plan = bench.plan
    measured = bench.document.find(of)
    if NONE not in measured.get("us", {}):
        raise JobError(f"needs the part `{of}`")
    setting, us = measured["setting"], measured["us"]
    sizes = bench.call(plan.base, "training:bucket_sizes", setting=setting)[0]
    section.data["buckets"] = sizes

    def turn(variant: str) -> float:
        return slowest(bench.call(variant, "calls:together", sizes=sizes, rounds=3))

    alone = medians(bench.alternate(plan.variants, turn, section))
    section.data["alone"] = alone
    for variant, alone_us in alone.items():
        if variant in us:
            exposed = us[variant] - us[NONE]
            times = (format_time(alone_us), format_time(max(0.0, exposed)))
            cells = (f"{1 - exposed / alone_us:.0%}", traced(bench, section, variant, setting, of))
            section.rows.append((variant, *times, *cells))
    names = ", ".join(format_size(size) for size in sizes)
    section.remarks.append(
        f"alone: DDP's buckets ({names}), all in flight; exposed: a step's time above that without "
        "communication, in which DDP fills its buckets; hidden: 1 - exposed / alone"
    )
    section.remarks.append(OF_A_TRACE)
    bench.free()


def traced(
    bench: Bench,
    section: Section,
    variant: str,
    setting: dict[str, Any],
    name: str,
    buckets: list[int] | None = None,
) -> str:
    """Record a profile; return the cell that says what it hides."""
    path = str(bench.folder.absolute() / f"gpu_trace_{name}_{slug(variant)}.json")
    given: dict[str, Any] = {"setting": setting, "path": path, "buckets": buckets}
    try:
        found: dict[str, float] = bench.call(variant, "training:trace", **given)[0]
    except JobError as failure:
        section.error += f"trace: {failure}\n"
        return "-"
    section.data[f"trace, {name}, {variant}"] = found
    if not found:
        return "-"
    return f"{found['hidden']:.0%} of {format_time(found['communication_us'])}"


def overlap(bench: Bench, section: Section) -> None:
    """Measure a pass that computes as long as it communicates against the longer of the two."""
    plan = bench.plan
    section.columns = ("variant", "computation", "communication", "both", "x the longer")
    given: dict[str, Any] = {"buckets": BUCKETS, "nbytes": plan.bucket, "seconds": 0.0}
    variants = [] if plan.device == "cpu" else plan.variants
    cases = {"computation": (True, False), "communication": (False, True), "both": (True, True)}

    def turn(case: str) -> float:
        variant, name = case.split(": ")
        compute, reduce = cases[name]
        target = "overlap:backward_us"
        return slowest(bench.call(variant, target, compute=compute, reduce=reduce, **given))

    for variant in variants:
        for _ in range(2):  # the first one pins memory
            alone = turn(f"{variant}: communication")
        given["seconds"] = 1e-6 * alone / BUCKETS
        found = medians(bench.alternate([f"{variant}: {name}" for name in cases], turn, section))
        section.data[variant] = found
        if len(found) == len(cases):
            times = [*found.values()]
            ratio = times[2] / max(times[:2])
            section.rows.append((variant, *map(format_time, times), f"{ratio:.2f}"))
    section.remarks.append(
        f"{BUCKETS} buckets of {format_size(plan.bucket)}, each reduced after a part of a "
        "computation that needs neither memory nor processors"
    )


PARTS = (
    Part("correctness", "device tensors against CPU tensors", correctness, 170.0),
    Part("floor", "copies, and the reduction on the host", floor, 90.0),
    Part("all_reduce", "reductions of device tensors", reductions, 120.0),
    Part("products", "matrix products beside reductions", products, 75.0),
    Part(STEPS, "a training step", steps, 120.0),
    Part("hidden", "communication hidden behind the backward pass", hidden, 75.0),
    Part(DEEP, "a step of a model with more layers", partial(steps, model="deep_model"), 120.0),
    Part("hidden_deep", "communication of that model", partial(hidden, of=DEEP), 75.0),
    Part("overlap", "reductions beside a computation", overlap, 60.0),
    Part("host", "time of the host", host, 60.0),
)
"""Cheap and important ones first."""
