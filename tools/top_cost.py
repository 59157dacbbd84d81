"""What `sdp top` beside a job costs a DDP step: windows with and without it, in turns.

sdp run -n 2 tools/top_cost.py [OPTIONS OF sdp top]

Rank 0 starts the command on a terminal of its own, and stops and continues it by signals. It also
prints the processor time that the command took, which varies less than the time of a step.
"""

import os
import pty
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

PAIRS, STEPS, WARM_UP = 30, 30, 20


@contextmanager
def top() -> Iterator[int]:
    """The command on a terminal that somebody reads; its pid."""
    ours, theirs = pty.openpty()
    line = [sys.executable, "-m", "sdp_plugins.top", str(os.getpid()), *sys.argv[1:]]
    with subprocess.Popen(
        line, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(theirs)
        threading.Thread(target=drain, args=[ours], daemon=True).start()
        time.sleep(3)
        if process.poll() is not None:
            raise SystemExit("sdp top has ended")
        yield process.pid
        process.send_signal(signal.SIGCONT)
        process.kill()


def drain(terminal: int) -> None:
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:  # the other end is closed
        return


def processor_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(pid: int, step: Callable[[], None], take: int) -> None:
    took: dict[bool, list[float]] = {True: [], False: []}
    used_s = 0.0
    for pair in range(PAIRS):
        for watched in (True, False) if pair % 2 else (False, True):
            if pid:
                os.kill(pid, signal.SIGCONT if watched else signal.SIGSTOP)
            before = processor_s(pid) if pid else 0.0
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(take):
                step()
            took[watched].append((time.perf_counter() - begin) / take)
            used_s += processor_s(pid) - before if pid else 0.0
    if not pid:
        return
    ratios = [on / off for on, off in zip(took[True], took[False], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    part = used_s / (sum(took[True]) * take)
    print(f"DDP step {1e3 * statistics.median(took[False]):.1f} ms without it")
    print(f"with it {middle:.4f} of that (half of the pairs {low:.4f} to {high:.4f})")
    print(f"it took {1e3 * part:.1f} ms of a core in each second")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    ddp = nn.parallel.DistributedDataParallel(model)
    x, y = torch.rand(64, 1024), torch.rand(64, 1024)

    def step() -> None:
        functional.mse_loss(ddp(x), y).backward()
        model.zero_grad()

    for _ in range(WARM_UP):
        step()
    if dist.get_rank() == 0:
        with top() as pid:
            measure(pid, step, STEPS)
    else:
        measure(0, step, STEPS)


if __name__ == "__main__":
    main()
