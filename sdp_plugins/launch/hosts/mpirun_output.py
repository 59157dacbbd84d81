"""The output of mpirun, and of agents that have not reached the launcher."""

from __future__ import annotations

import os
from collections import deque

from sdp_plugins.launch.event_loop import EventLoop
from sdp_plugins.launch.output import CHUNK, Sink
from sdp_plugins.launch.spawn import RankProcess

MOST_PIECES = 256


class MpirunOutput:
    """Buffers mpirun's output, and forwards it only while the job runs.

    So the last lines of a failed job are the launcher's report, not mpirun's messages about the
    ranks that it ended.

    Args:
        loop: Reads the output.
        sink: Destination of the output.
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
        """Read all output that is available."""
        for pipe in self.pipes:
            while pipe.read():
                pass

    def text(self) -> str:
        """The buffered output."""
        return b"".join(self.kept).decode(errors="replace")

    def show(self) -> None:
        """Show the buffered output."""
        if words := b"".join(self.kept).strip():
            self.stream.feed(words + b"\n")


class MpirunPipe:
    """One of mpirun's two pipes."""

    def __init__(self, mpirun_output: MpirunOutput, fd: int) -> None:
        self.mpirun_output = mpirun_output
        self.fd = fd

    def held_back(self) -> bool:
        """Never: the output is short."""
        return False

    def read_ready(self) -> bool:
        """Read the available data; False at the end."""
        return self.read() is not False

    def read(self) -> bool | None:
        """Buffer the available data; False at the end, None if there are none yet."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return None
        if data:
            self.mpirun_output.kept.append(data)
        if data and self.mpirun_output.live:
            self.mpirun_output.stream.feed(data)
        return bool(data)
