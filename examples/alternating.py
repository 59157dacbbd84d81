"""Steps of HuggingFace's Trainer over gloo and over smddp in turns, in the same processes.

What else the machine does meets both alike; the ratio is what counts, not the times.
"""

import os
import socket
import statistics
import time
from collections.abc import Callable

import torch.distributed as dist
from transformers import Trainer, TrainerCallback

BACKENDS = ("gloo", "smddp")
PAIRS = 9
WARM_UP_STEPS = 5  # DDP rebuilds its buckets, smddp moves them into shared memory

Train = Callable[[str, TrainerCallback], Trainer]


class StepTimes(TrainerCallback):
    """The times from one step's end to the next: data, forward, backward, optimizer."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._ended = 0.0

    def on_step_end(self, args, state, control, **others) -> None:
        """Take the time."""
        now = time.perf_counter()
        if state.global_step > WARM_UP_STEPS:
            self.times_s.append(now - self._ended)
        self._ended = now


def compare(train: Train) -> None:
    """Train in turns, and print how many times as fast the second backend is.

    Args:
        train: Trains over a backend with a callback.
    """
    pairs: list[dict[str, list[float]]] = []
    for pair in range(PAIRS):
        order = BACKENDS[:: -1 if pair % 2 else 1]  # neither always comes first
        pairs.append({backend: turn(train, backend) for backend in order})
    if os.environ.get("RANK", "0") == "0":
        print(summary(pairs))


def summary(pairs: list[dict[str, list[float]]]) -> str:
    """The ratio of each pair's medians, and of the quicker steps of all turns.

    Other load on the machine makes steps longer, never shorter: of the quickest quarter it has
    lengthened the least.
    """
    first, second = BACKENDS
    ratios = sorted(statistics.median(p[first]) / statistics.median(p[second]) for p in pairs)
    quick_ms = {b: 1e3 * quartile([time for p in pairs for time in p[b]]) for b in BACKENDS}
    return (
        f"a step over {second} is {statistics.median(ratios):.2f} times as fast as over {first} "
        f"(median of {len(pairs)} pairs of turns, {ratios[0]:.2f} to {ratios[-1]:.2f}); of the "
        f"quicker steps {quick_ms[first] / quick_ms[second]:.2f} times: a quarter of them takes at "
        f"most {quick_ms[second]:.0f} ms over {second}, {quick_ms[first]:.0f} ms over {first}"
    )


def quartile(times: list[float]) -> float:
    """Of a quarter of the times this is the longest."""
    return statistics.quantiles(times, n=4)[0]


def turn(train: Train, backend: str) -> list[float]:
    """The times of a turn's steps."""
    times = StepTimes()
    train(backend, times)
    meet_elsewhere()
    return times.times_s


def meet_elsewhere() -> None:
    """Leave the group; the next one has another port, as a rank may still find this one's store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    if "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        os.environ["MASTER_PORT"] = str(port[0])
