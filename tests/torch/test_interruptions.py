"""A rank that is interrupted, or ends with an exception, in a script that handles neither."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.torch import sparse
from tests.ranks import HANG_S, say, start_ranks
from tests.torch import models


def train_beside_a_stopped_rank(rank: int, world: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group("smddp")
    model = models.wrap(models.Plain, None)
    models.train(model, rank)
    say("training")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(KeyboardInterrupt):
        models.train(model, rank, steps=1_000_000)


def stop_within_a_sparse_sum(rank: int, world: int) -> None:
    """Rank 1 says how many entries it has, but does not send them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group("smddp")
    model = DistributedDataParallel(torch.nn.EmbeddingBag(10, 3, sparse=True))
    say("training")
    exchange = sparse._exchange_counts

    def stop(*arguments: Any) -> Any:
        counts = exchange(*arguments)
        os.kill(os.getpid(), signal.SIGSTOP)
        return counts

    stopping = mock.patch.object(sparse, "_exchange_counts", stop if rank == 1 else exchange)
    with stopping, pytest.raises(KeyboardInterrupt):
        model(torch.arange(4).view(2, 2)).sum().backward()


@pytest.mark.parametrize("train", [train_beside_a_stopped_rank, stop_within_a_sparse_sum])
def test_ctrl_c_in_a_backward_pass(train: Callable[[int, int], None]) -> None:
    """DDP waits in C++ at its end, where Python notices no signal."""
    with start_ranks(2, train) as ranks:
        for rank in ranks:
            assert rank.heard() == "training"
        time.sleep(0.5)  # the wait begins
        ranks[0].kill(signal.SIGINT)
        ranks[0].result()
        ranks[1].kill(signal.SIGKILL)


SCRIPT = """\
import torch, torch.distributed as dist

dist.init_process_group("smddp")
if dist.get_rank() == 1:
    raise ValueError("the data is bad\\nin many ways")
dist.all_reduce(torch.ones(1000))
"""


def test_peers_read_why_a_script_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = [sys.executable, "-m", "sdp_plugins.launch", "run", "-n", "2", str(script)]
    done = subprocess.run(job, capture_output=True, text=True, timeout=HANG_S, check=False)
    lost = [line for line in done.stderr.splitlines() if "PeerLostError: [rank 0/2]" in line]
    assert lost, done.stderr
    assert "rank 1 gave up: ValueError: the data is bad. Hint" in lost[0]
    assert done.returncode == 1
