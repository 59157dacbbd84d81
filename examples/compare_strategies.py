"""Runs an example once for each strategy, shows a table, and says whether all went well."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

REQUIRED_ACCURACY = 0.97


def compare(script: str, strategies: dict[str, str]) -> int:
    """Train with each strategy and print the table; the exit code is 0 if all met their bars.

    Args:
        script: The example, which takes --strategy and --results.
        strategies: Names of Lightning strategies, with what to call them in the table.
    """
    console = Console()
    results = {}
    for strategy, label in strategies.items():
        console.rule(f'{label}: Trainer(strategy="{strategy}")')
        results[label] = run(script, strategy)
    console.print(table(results))
    console.print(summary(results))
    failures = [text for label, result in results.items() for text in problems(label, result)]
    for text in failures:
        console.print(f"[red]{text}[/red]")
    return 1 if failures else 0


def run(script: str, strategy: str) -> dict:
    """One training in a process of its own; ends this program when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        command = [sys.executable, script, "--strategy", strategy, "--results", str(path)]
        code = subprocess.run(command).returncode
        if code != 0:
            sys.exit(f"the run with strategy={strategy!r} failed with exit code {code}")
        return json.loads(path.read_text())


def table(results: dict[str, dict]) -> Table:
    """One row for each backend."""
    table = Table(title="Two workers, one thread each", title_justify="left")
    table.add_column("backend")
    for heading in ("test accuracy", "communication", "weights on all ranks"):
        table.add_column(heading, justify="right")
    for label, result in results.items():
        table.add_row(
            label,
            f"{result['accuracy']:.1%}",
            f"{result['communication']:.0%} of a step",
            "bitwise equal" if result["weights_equal"] else "[red]different[/red]",
        )
    return table


def summary(results: dict[str, dict]) -> str:
    """How much faster the last one trains than the first.

    Each against steps without communication in its own run: the runs follow each other, and what
    else the machine does would decide otherwise.
    """
    first, *_, last = results
    ratio = (1 - results[last]["communication"]) / (1 - results[first]["communication"])
    text = (
        f"{last} trains {ratio:.2f} times as fast as {first}: each is compared with steps without "
        "communication, which alternate with its own."
    )
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores * 1.5:
        text += f"\nThe machine is busy (load {load:.1f} on {cores} cores): repeat this later."
    return text


def problems(label: str, result: dict) -> list[str]:
    """What a run did not reach."""
    found = []
    if result["accuracy"] < REQUIRED_ACCURACY:
        found.append(f"{label}: accuracy {result['accuracy']:.1%} is below {REQUIRED_ACCURACY:.0%}")
    if not result["weights_equal"]:
        found.append(f"{label}: the ranks' weights differ")
    return found
