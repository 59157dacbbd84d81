"""The output of mpirun, and of agents that have not reached the launcher."""

from __future__ import annotations

from collections import deque

from sdp_plugins.launch.event_loop import EventLoop
from sdp_plugins.launch.output import Pipe, Sink
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
        self.pipes = [Pipe(fd, self.take) for fd in (mpirun.stdout, mpirun.stderr)]
        for pipe in self.pipes:
            loop.add_source(pipe)

    def read(self) -> None:
        """Read all output that is available."""
        for pipe in self.pipes:
            pipe.read_ready()

    def take(self, data: bytes) -> None:
        """Buffer data of mpirun; at the end, when there are none, nothing is evicted for them."""
        if data:
            self.kept.append(data)
        if self.live:
            self.stream.feed(data)

    def text(self) -> str:
        """The buffered output."""
        return b"".join(self.kept).decode(errors="replace")

    def show(self) -> None:
        """Show the buffered output, unless it has been shown, and all that follows."""
        if not self.live and (words := b"".join(self.kept).strip()):
            self.stream.feed(words + b"\n")
        self.live = True
