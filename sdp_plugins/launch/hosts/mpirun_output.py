"""What mpirun itself says, and the agents before they reach the launcher."""

from __future__ import annotations

import os
from collections import deque

from sdp_plugins.launch.event_loop import EventLoop
from sdp_plugins.launch.output import CHUNK, Sink
from sdp_plugins.launch.spawn import RankProcess

MOST_PIECES = 256


class MpirunOutput:
    """Buffers mpirun's output, and shows it only while the job runs.

    The last lines of a job that fails are our report, not mpirun's account of how it ended the
    other ranks.

    Args:
        loop: Reads it.
        sink: Where it is shown.
        mpirun: The process.
    """

    def __init__(self, loop: EventLoop, sink: Sink, mpirun: RankProcess) -> None:
        self.live = False
        self.kept: deque[bytes] = deque(maxlen=MOST_PIECES)
        self.stream = loop.add_stream("[mpirun] ", sink)
        self.pipes = [MpirunPipe(self, fd) for fd in (mpirun.stdout, mpirun.stderr)]
        for pipe in self.pipes:
            os.set_blocking(pipe.fd, False)
            loop.add_source(pipe)

    def read(self) -> None:
        """Take what mpirun has said until now."""
        for pipe in self.pipes:
            while pipe.read():
                pass

    def text(self) -> str:
        """What was kept."""
        return b"".join(self.kept).decode(errors="replace")

    def show(self) -> None:
        """Show what was kept."""
        if words := b"".join(self.kept).strip():
            self.stream.feed(words + b"\n")


class MpirunPipe:
    """One of mpirun's two pipes."""

    def __init__(self, mpirun_output: MpirunOutput, fd: int) -> None:
        self.mpirun_output = mpirun_output
        self.fd = fd

    def held_back(self) -> bool:
        """Never: it is not much."""
        return False

    def read_ready(self) -> bool:
        """Take what there is; False at the end."""
        return self.read() is not False

    def read(self) -> bool | None:
        """Keep what there is; False at the end, None if there is nothing yet."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return None
        if data:
            self.mpirun_output.kept.append(data)
        if data and self.mpirun_output.live:
            self.mpirun_output.stream.feed(data)
        return bool(data)
