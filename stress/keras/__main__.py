"""Random Keras models: training on two and three ranks against one process.

python -m stress.keras --backend torch --cases 2000 --seed 1
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from stress.keras.plan import Plan, case
from stress.keras.reduce import reduced
from stress.keras.run import Outcome, Runner, Summary, still_differs
from tests.forked import close_servers
from tests.keras.first_ranks import BACKENDS, PROCESSES, environment
from tests.ranks import RankPool

WAYS = ("", "loss", "weights", "shard")


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m stress.keras", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--backend", choices=BACKENDS, default="torch")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="index of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this case alone, and show its plan")
    parser.add_argument("--plan", help="run this plan, as JSON or in a file")
    parser.add_argument("--show", action="store_true", help="show plans and run nothing")
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks to draw from")
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no case later")
    parser.add_argument("--reduce", type=int, default=25, help="tries to make a failing plan small")
    parser.add_argument("--verbose", action="store_true", help="a line for every case")
    parser.add_argument("--spoil", choices=WAYS, default="", help="what it has to find")
    return parser.parse_args(arguments)


def plans(asked: argparse.Namespace) -> Iterable[tuple[int, Plan]]:
    """Return the requested cases with their indices."""
    worlds = [int(number) for number in asked.ranks.split(",")]
    if asked.plan is not None:
        text = asked.plan if asked.plan.startswith("{") else Path(asked.plan).read_text()
        return [(0, Plan.from_json(text))]
    indices = range(asked.first, asked.first + asked.cases)
    if asked.only is not None:
        indices = range(asked.only, asked.only + 1)
    return ((index, case(asked.backend, asked.seed, index, worlds)) for index in indices)


def report(asked: argparse.Namespace, index: int, plan: Plan, outcome: Outcome) -> str:
    """Return the report on a case that differs."""
    again = f"python -m stress.keras --backend {plan.backend} --seed {asked.seed} --only {index}"
    if asked.ranks != "2,3":
        again += f" --ranks {asked.ranks}"
    if asked.spoil:
        again += f" --spoil {asked.spoil}"
    return f"DIFFERENT: case {index}\n{outcome.text}\n{plan.describe()}\nAgain: {again}"


def run(asked: argparse.Namespace) -> Summary:
    """Run all cases; print those that differ."""
    summary, runners, numbers = Summary(), SimpleQueue[Runner](), count(1)
    began = time.monotonic()
    compiled = TemporaryDirectory()
    for _ in range(asked.jobs):
        variables = environment(asked.backend, fast_compiler=False) | {
            "JAX_COMPILATION_CACHE_DIR": compiled.name,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        runners.put(Runner(RankPool(PROCESSES, variables), asked.spoil))

    def one(index: int, plan: Plan) -> None:
        if time.monotonic() - began > 60 * asked.minutes:
            return
        runner = runners.get()
        try:
            outcome = runner.run(plan)
            summary.add(outcome)
            if asked.verbose:
                line = outcome.text.partition("\n")[0][:200]
                print(f"case {index}: {outcome.kind} ({outcome.seconds:.1f} s) {line}", flush=True)
            if outcome.kind == "different":
                print(report(asked, index, plan, outcome), flush=True)
                small = reduced(plan, still_differs(runner), asked.reduce)
                if small != plan:
                    print(f"SMALLER: {small.describe()}\n{small.to_json()}", flush=True)
            if next(numbers) % 20 == 0:
                print(f"{time.strftime('%T')} case {index}: {summary}", flush=True)
        finally:
            runners.put(runner)

    with ThreadPoolExecutor(asked.jobs) as threads:
        for done in [threads.submit(one, index, plan) for index, plan in plans(asked)]:
            done.result()
    while not runners.empty():
        runners.get().close()
    compiled.cleanup()
    return summary


def main() -> int:
    """Run the cases and report; return 1 if there are differences."""
    asked = parsed()
    if asked.show or asked.only is not None or asked.plan is not None:
        for index, plan in plans(asked):
            print(f"case {index}: {plan.describe()}\n{plan.to_json()}", flush=True)
        if asked.show:
            return 0
    try:
        summary = run(asked)
    finally:
        close_servers()
    print(summary)
    for reason, times in summary.reasons.most_common():
        print(f"  {times} {reason}")
    return int(summary.kinds["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
