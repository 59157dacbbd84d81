"""Detection of calls from DDP's reducer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import UntypedStorage
from torch.autograd import Variable
from torch.distributed import GradBucket
from torch.distributed.algorithms.join import Join

from sdp_plugins.torch.internals import current_backward_pass, run_backward_code

_NOTIFY = Join.notify_join_context.__code__
# The call and its caller, dist.all_reduce, its decorator, notify_join_context. An active
# TorchFunctionMode, as in `with torch.device("cpu")`, repeats the first two with three more frames
# in between.
_FRAMES_TO_NOTIFY = 9


def called_by_reducer() -> bool:
    """Return whether C++ called the caller in a backward pass, as DDP without a comm hook does."""
    caller = sys._getframe(1).f_back
    # The backward pass of an accelerator runs in a thread without other Python frames.
    return caller is None or caller.f_code is run_backward_code


def in_grad_bucket(storage: UntypedStorage) -> bool:
    """Return whether a comm hook makes the current call and has received the storage's bucket.

    Only DDP's reducer makes `GradBucket`s, and it passes them as the parameter `bucket`, a name
    that DDP requires.
    """
    if current_backward_pass() < 0:  # spares most calls the walk, which takes 10 us after a copy
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (code := frame.f_code) is not run_backward_code:
        # Before Python 3.13, f_locals keeps all variables of a frame alive until it returns.
        if "bucket" in code.co_varnames[: code.co_argcount]:
            bucket = frame.f_locals.get("bucket")  # None: the hook has deleted it
            if isinstance(bucket, GradBucket):
                return bucket.buffer().untyped_storage()._cdata == storage._cdata
        frame = frame.f_back
    return False


def wait_in_python(wait: Callable[[], Any]) -> None:
    """Wait at the end of this backward pass, before the reducer does.

    The reducer waits in C++ for the futures of all buckets, where Ctrl-C has no effect until the
    timeout. The callbacks of a backward pass run in order, and the reducer queues its own callback
    after all buckets.
    """
    Variable._execution_engine.queue_callback(wait)


def joining() -> Any:
    """Return the module whose DDP.join() makes the current call, or None.

    DDP.join() passes the work to the module's reducer, which keeps only the C++ half until the next
    work.
    """
    frame = sys._getframe(2)
    for _ in range(_FRAMES_TO_NOTIFY):
        if frame.f_code is _NOTIFY:
            return frame.f_locals["joinable"]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
