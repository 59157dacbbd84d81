"""What is special about calls that come from DDP's reducer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.autograd import Variable, graph

# Present in torch 2.13; where it is not, Ctrl-C in a backward pass has to wait for the peers.
_RUN_BACKWARD = getattr(getattr(graph, "_engine_run_backward", None), "__code__", None)


def called_by_reducer() -> bool:
    """Whether the caller was called from C++ within a backward pass: by DDP without a comm hook."""
    return sys._getframe(2).f_code is _RUN_BACKWARD


def wait_in_python(wait: Callable[[], Any]) -> None:
    """Wait at the end of this backward pass, before the reducer does.

    That waits in C++ for the futures of all buckets, where Ctrl-C would have no effect until the
    time-out. Callbacks of a pass run in order, and the reducer queues its own after all buckets.
    """
    Variable._execution_engine.queue_callback(wait)
