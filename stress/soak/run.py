"""A soak: random collectives against NumPy, and no growth of memory, descriptors or threads.

python -m stress.soak.run --minutes 20 --ranks 4 --seed 1
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch.distributed as dist

from stress.soak.growth import described, growth
from stress.soak.rank import CHECKPOINT, Settings, soak
from stress.soak.spoiling import WAYS
from tests.forked import close_servers, forks_of
from tests.rank import RankFailure
from tests.ranks import Ranks, spawn

GRACE_S = 120.0


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m stress.soak.run", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="stop after so many (to see one again)")
    parser.add_argument("--spoil", choices=list(WAYS), default="", help="what it has to find")
    parser.add_argument("--checkpoint", type=int, default=CHECKPOINT, help="steps between samples")
    return parser.parse_args(arguments)


def run(world: int, settings: Settings, progress: bool = False) -> list[dict[str, Any]]:
    """Return every rank's result.

    Raises:
        RankFailure: A rank failed.
    """
    limit_s = settings.seconds + GRACE_S
    with spawn(world, None, forks_of("stress.soak.ready")) as ranks:
        ranks.give(soak, (settings,), {})
        if progress:
            listen(ranks, limit_s)
        results = ranks.results(limit_s)
        ranks.finish()
        return results


def listen(ranks: Ranks, limit_s: float) -> None:
    """Print rank 0's messages until a rank ends."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and not any(rank.outcome(0).kind != "running" for rank in ranks):
        if ranks[0]._said:
            index, sample = ranks[0]._said.pop(0)
            print(f"{time.strftime('%T')} step {index}: {sample}", flush=True)
        elif ranks[0].wait(1.0):
            ranks[0].receive()


def first_failure(error: RankFailure) -> str:
    """Return the text of the rank that failed first, which caused the other failures."""
    failed = [outcome for outcome in error.outcomes if outcome.kind != "returned"]
    first = min(failed, key=lambda outcome: outcome.ended_at or float("inf"))
    return f"{first.error or first.describe()}\n{first.traceback}"


def main() -> int:
    """Run the soak and report."""
    asked = parsed()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seconds = 1e5 if asked.steps is not None else 60 * asked.minutes
    settings = Settings(asked.seed, seconds, asked.steps, store.port, asked.spoil, asked.checkpoint)
    try:
        results = run(asked.ranks, settings, progress=True)
    except RankFailure as error:
        print(error, first_failure(error), sep="\n\nFIRST: ", file=sys.stderr)
        return 1
    finally:
        close_servers()
    return told(results)


def told(results: list[dict[str, Any]]) -> int:
    """Print the figures; return 1 if a resource grew."""
    print(f"{results[0]['steps']} steps without a mismatch; times each was planned:")
    print("  " + ", ".join(f"{name} {n}" for name, n in sorted(results[0]["done"].items())))
    grew = False
    for rank, result in enumerate(results):
        print(f"rank {rank}:\n{described(result['samples'])}")
        for what, text in growth(result["samples"]).items():
            grew = True
            print(f"  GREW: {what} {text}")
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
