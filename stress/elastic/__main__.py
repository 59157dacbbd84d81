"""Run elastic trainings, lose ranks at random moments, and check what is promised.

python -m stress.elastic --faults 1000 --seed 1
python -m stress.elastic --accuracy --seed 1
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict

from stress.elastic.accuracy import compare, outcome
from stress.elastic.check import problems
from stress.elastic.job import Fault, Job, StuckError
from stress.elastic.rank import Setting

KINDS = ("kill", "kill", "kill", "kill 2")
EPOCHS = 10**6


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m stress.elastic", description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--per-job", type=int, default=50, help="faults of one training")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stop", action="store_true", help="SIGSTOP instead of SIGKILL")
    parser.add_argument("--timeout", type=float, default=None, help="of an operation, in seconds")
    parser.add_argument(
        "--accuracy", action="store_true", help="10 kills and joins in one epoch, and without"
    )
    return parser.parse_args()


def play(job: Job, kinds: tuple[str, ...], count: int) -> list[str]:
    """Run one training with some faults; what does not hold."""
    try:
        for number in range(job.world):
            job.start(number, join=False)
        job.await_step(set(range(job.world)), 0.0)
        for _ in range(count):
            job.fault(job.random.choice(kinds))
    except StuckError as error:
        return [str(error)]
    finally:
        job.close()
    return list(problems(job.committed, is_whole=False))


def table(faults: list[Fault]) -> str:
    """Times by kind."""
    rows: dict[str, list[float]] = defaultdict(list)
    for fault in faults:
        rows[fault.kind].append(fault.seconds)
    lines = ["| fault | number | median | 99 % | worst |", "|---|---|---|---|---|"]
    for kind, times in sorted(rows.items()):
        times.sort()
        high = times[min(len(times) - 1, int(0.99 * len(times)))]
        middle = statistics.median(times)
        lines.append(
            f"| {kind} | {len(times)} | {middle:.3f} s | {high:.3f} s | {times[-1]:.3f} s |"
        )
    return "\n".join(lines)


def accuracies(options: argparse.Namespace) -> None:
    """Train with kills and without, and compare."""
    timeout_s = options.timeout or 30.0
    pair = [outcome(options.ranks, kills, options.seed, timeout_s) for kills in (10, 0)]
    for one in pair:
        steps = len({told.step for told in one.job.committed})
        print(f"{len(one.job.faults) // 2} kills, {steps} steps, accuracy {one.accuracy:.3f}")
    found = compare(*pair)
    print("; ".join(found) or "all promises kept")
    sys.exit(1 if found else 0)


def main() -> None:
    """Run trainings until there have been enough faults."""
    options = parsed()
    if options.accuracy:
        accuracies(options)
    timeout_s = options.timeout or (2.0 if options.stop else 30.0)
    kinds = ("stop",) if options.stop else KINDS
    faults: list[Fault] = []
    wrong, done, number = 0, 0, 0
    while done < options.faults:
        since = time.monotonic()
        count = min(options.per_job, options.faults - done)
        job = Job(
            options.ranks, Setting(timeout_s, EPOCHS), random.Random(f"{options.seed} {number}")
        )
        found = play(job, kinds, count)
        faults += job.faults
        steps = len({one.step for one in job.committed})
        print(
            f"training {number}: {count} faults, {steps} steps, {time.monotonic() - since:.0f} s: "
            f"{'; '.join(found) or 'all promises kept'}",
            flush=True,
        )
        for text in job.left:
            print(f"    {text}")
        wrong += bool(found)
        done, number = done + count, number + 1
    print(table(faults))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
