"""The parts of `gpu` in which rank 0 has a GPU to itself: the other ranks' CPUs play theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu.bench import Bench, Part, medians
from benchmarks.gpu.document import Section
from benchmarks.gpu.parts import rate
from benchmarks.gpu.training_parts import OF_A_TRACE, find_setting, measure_products, traced
from benchmarks.units import format_size, format_time

PLAYED = "the other ranks have no GPU: their CPUs reduce, as they do after a copy from a device"


@contextmanager
def played(bench: Bench) -> Iterator[list[str]]:
    """Give rank 0 the GPU; yield the variants that can be measured so."""
    variants = bench.plan.ours if bench.plan.device != "cpu" else []
    for variant in variants:
        bench.call(variant, "peer:play", on=True)
    try:
        yield variants
    finally:
        for variant in variants:
            bench.call(variant, "peer:play", on=False)


def reductions(bench: Bench, section: Section) -> None:
    """Measure all_reduce on rank 0's tensors."""
    plan = bench.plan
    section.columns = ("size", "variant", "one call", "of several in flight", "GB/s", "x floor")
    copies = bench.document.find("floor").get("registered", {})
    core = bench.document.find("floor").get("core", {})
    floor = max(copies.get("down + up, one rank", 0.0), min(core.values(), default=0.0))
    with played(bench) as variants:
        for nbytes in plan.sizes:
            calls = max(2, min(plan.calls, plan.calls * plan.bucket // nbytes))
            found: dict[str, dict[str, float]] = {}
            for way in ("one_by_one", "in_flight"):

                def turn(variant: str, way: str = way, n: int = nbytes, calls: int = calls) -> Any:
                    return bench.call(variant, f"calls:{way}", nbytes=n, calls=calls)[0]

                rounds = bench.alternate(variants, turn, section)
                section.data[f"{nbytes} {way}"] = rounds
                found[way] = medians(rounds)
            for variant in variants:
                one, many = (found[way].get(variant, 0.0) for way in found)
                times = many / (floor * nbytes / plan.bucket) if floor else 0.0
                cells = (format_time(one), format_time(many), rate(nbytes, many), f"{times:.2f}")
                section.rows.append((format_size(nbytes), variant, *cells))
    section.remarks.append(
        f"floor: {format_time(floor)} for {format_size(plan.bucket)}, the longer of one rank's "
        "copies down and up at once, and of the core's fastest reduction"
    )
    section.remarks.append(PLAYED)


def products(bench: Bench, section: Section) -> None:
    """Measure matrix products on rank 0 alone and beside reductions."""
    with played(bench) as variants:
        measure_products(bench, section, variants)
    section.remarks.append(PLAYED)


def steps(bench: Bench, section: Section) -> None:
    """Measure rank 0's training steps, and which share of the communication they hide."""
    plan = bench.plan
    section.columns = (
        *("model", "variant", "ms per step", "time of none"),
        *("alone", "exposed", "hidden", "hidden, of a trace"),
    )
    for name, model in (("BERT-Medium", plan.model), ("more layers", plan.deep_model)):
        setting = find_setting(bench, section, model, alone=True)
        buckets = bench.call(plan.base, "training:bucket_sizes", setting=setting)[0]
        for variant in plan.ours if plan.device != "cpu" else []:
            bench.call(variant, "training:prepare", setting=setting)
        with played(bench) as variants:
            _steps(bench, section, name, setting, buckets, variants)
        bench.free()
    section.remarks.append(PLAYED)
    section.remarks.append(
        "exposed: a step's time above that without communication; hidden: 1 - exposed / alone"
    )
    section.remarks.append(OF_A_TRACE)


def _steps(
    bench: Bench,
    section: Section,
    name: str,
    setting: dict[str, Any],
    buckets: list[int],
    variants: list[str],
) -> None:
    given: dict[str, Any] = {"setting": setting, "steps": bench.plan.steps, "buckets": buckets}
    cases = [(variant, reduce) for variant in variants for reduce in (False, True)]

    def turn(case: str) -> float:
        variant, reduce = cases[int(case)]
        return float(bench.call(variant, "training:step_us", reduce=reduce, **given)[0])

    def alone(variant: str) -> float:
        return float(bench.call(variant, "calls:together", sizes=buckets, rounds=3)[0])

    found = medians(bench.alternate(map(str, range(len(cases))), turn, section))
    lonely = medians(bench.alternate(variants, alone, section))
    file = f"own_{name.split()[0].lower()}"
    seen = {v: traced(bench, section, v, setting, file, buckets) for v in variants}
    section.data[name] = {"buckets": buckets, "steps": found, "alone": lonely}
    for number, variant in enumerate(variants):
        none, ours = found.get(str(2 * number)), found.get(str(2 * number + 1))
        if none and ours and variant in lonely:
            exposed = ours - none
            cells = (f"{ours / 1e3:.2f}", f"{ours / none:.3f} x", format_time(lonely[variant]))
            hidden = (f"{1 - exposed / lonely[variant]:.0%}", seen[variant])
            section.rows.append((name, variant, *cells, format_time(max(0.0, exposed)), *hidden))


PARTS = (
    Part("own_all_reduce", "reductions of a rank with a GPU of its own", reductions, 60.0),
    Part("own_products", "matrix products beside reductions, likewise", products, 60.0),
    Part("own_steps", "training steps, likewise", steps, 100.0),
)
