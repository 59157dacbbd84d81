"""What is special about calls that come from DDP's reducer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.autograd import Variable
from torch.distributed.algorithms.join import Join

from sdp_plugins.torch.internals import run_backward_code

_NOTIFY = Join.notify_join_context.__code__
# The call, dist.all_reduce, its decorator, notify_join_context; and the first two again with three
# more in between where a TorchFunctionMode is active, as in `with torch.device("cpu")`.
_FRAMES_TO_NOTIFY = 8


def called_by_reducer() -> bool:
    """Whether the caller was called from C++ within a backward pass: by DDP without a comm hook."""
    return sys._getframe(2).f_code is run_backward_code


def wait_in_python(wait: Callable[[], Any]) -> None:
    """Wait at the end of this backward pass, before the reducer does.

    That waits in C++ for the futures of all buckets, where Ctrl-C would have no effect until the
    time-out. Callbacks of a pass run in order, and the reducer queues its own after all buckets.
    """
    Variable._execution_engine.queue_callback(wait)


def joining() -> Any:
    """The module whose DDP.join() calls, if one does.

    It gives the work to its reducer, which keeps only the half that is C++, until the next one.
    """
    frame = sys._getframe(2)
    for _ in range(_FRAMES_TO_NOTIFY):
        if frame.f_code is _NOTIFY:
            return frame.f_locals["joinable"]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
