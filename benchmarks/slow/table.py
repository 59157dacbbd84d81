"""The tables of `slow`."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table

from benchmarks.slow.measure import SlowReport
from benchmarks.slow.names import BERT, FLOAT32, GLOO, LANGUAGE, NONE
from benchmarks.slow.rounding import rounding_table

_TITLES = {BERT: "BERT-Medium", LANGUAGE: "a small language model"}


def tables(report: SlowReport) -> Iterator[tuple[Table, str]]:
    """Yield each table, and the name of its section in a document."""
    for model in report.step_s:
        yield steps_table(report, model), f"slow-{model}"
    if report.losses:
        yield losses_table(report), "slow-losses"
    if report.rounding_s:
        yield rounding_table(report.rounding_s), "slow-rounding"


def steps_table(report: SlowReport, model: str) -> Table:
    """Return the times and bytes of steps."""
    plan = report.plan
    table = Table(
        title=f"steps of {_TITLES[model]} ({report.parameters[model] / 1e6:.1f} M parameters), "
        f"{plan.nodes} nodes of one rank",
        caption=f"medians of {plan.rounds} rounds, of times and of ratios; x gloo: how many times "
        "as fast as gloo; of none: speed as a share of that without communication; link: bytes at "
        "the busiest node's interface per step and direction, headers and all",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("Mbit/s", justify="right", no_wrap=True)
    table.add_column("training", no_wrap=True)
    for name in ("ms/step", "x gloo", "of none", "link MB", "of float32"):
        table.add_column(name, justify="right", no_wrap=True)
    for mbit in report.step_s[model]:
        place = f"{mbit:g}"
        sent = report.sent[model][mbit]
        for variant in plan.variants:
            seconds = report.median_s(model, mbit, variant)
            to_gloo, of_none = (report.speed(model, mbit, variant, name) for name in (GLOO, NONE))
            table.add_row(
                place,
                variant,
                f"{seconds * 1e3:.0f}",
                f"{to_gloo:.2f}" if to_gloo else "-",
                f"{of_none:.1%}" if of_none else "-",
                f"{sent[variant] / 1e6:.2f}",
                f"{sent[variant] / sent[FLOAT32]:.4f}" if FLOAT32 in sent else "-",
            )
            place = ""
        table.add_section()
    return table


def losses_table(report: SlowReport) -> Table:
    """Return the losses by steps, and the time until the last one."""
    plan, speeds = report.plan, list(report.step_s.get(LANGUAGE, {}))
    table = Table(
        title=f"loss of a small language model on text that was held out; {plan.nodes} ranks, "
        f"means of {plan.seeds} seeds",
        caption="to float32's: how far the last loss is from float32's; min: of all steps, at the "
        "times of steps above",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("training", no_wrap=True)
    points = range(1, len(report.points), 3)
    heads = [f"step {report.points[point]}" for point in points]
    for name in (*heads, "to float32's", *(f"min at {mbit:g}" for mbit in speeds)):
        table.add_column(name, justify="right", no_wrap=True)
    for variant in report.losses:
        away = "-"
        if FLOAT32 in report.losses:
            away = f"{report.loss(variant) / report.loss(FLOAT32) - 1:+.2%}"
        times = [report.median_s(LANGUAGE, mbit, variant) for mbit in speeds]
        table.add_row(
            variant,
            *(f"{report.loss(variant, point):.4f}" for point in points),
            away,
            *(f"{seconds * plan.loss_steps / 60:.1f}" for seconds in times),
        )
    return table
