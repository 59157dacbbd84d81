"""Making a stream of an accelerator the current one."""

from __future__ import annotations

import torch


def on(stream: torch.Stream) -> torch.Stream:
    """Return a context in which a stream is the calling thread's current one.

    torch keeps the stream to go back to in the object that is entered. Threads must not share that:
    each would leave with the other's stream.
    """
    same: torch.Stream = torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )
    return same
