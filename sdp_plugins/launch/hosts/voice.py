"""What mpirun itself says, and the agents before they reach the launcher."""

from __future__ import annotations

import os
from collections import deque

from sdp_plugins.launch.output import CHUNK, Sink
from sdp_plugins.launch.pump import Pump
from sdp_plugins.launch.spawn import RankProcess

MOST_PIECES = 256


class Voice:
    """mpirun's output: kept, and shown while the job runs, but not when it starts or ends.

    Of a job that fails, our report comes last, and not mpirun's of how it ended the others.

    Args:
        pump: Reads it.
        sink: Where it is shown.
        mpirun: The process.
    """

    def __init__(self, pump: Pump, sink: Sink, mpirun: RankProcess) -> None:
        self.live = False
        self.kept: deque[bytes] = deque(maxlen=MOST_PIECES)
        self.stream = pump.add_stream("[mpirun] ", sink)
        self.ears = [Ear(self, fd) for fd in (mpirun.stdout, mpirun.stderr)]
        for ear in self.ears:
            os.set_blocking(ear.fd, False)
            pump.add_source(ear)

    def listen(self) -> None:
        """Take what mpirun has said until now."""
        for ear in self.ears:
            while ear.hear():
                pass

    def text(self) -> str:
        """What was kept."""
        return b"".join(self.kept).decode(errors="replace")

    def show(self) -> None:
        """Show what was kept."""
        if words := b"".join(self.kept).strip():
            self.stream.feed(words + b"\n")


class Ear:
    """One of mpirun's two pipes."""

    def __init__(self, voice: Voice, fd: int) -> None:
        self.voice = voice
        self.fd = fd

    def held_back(self) -> bool:
        """Never: it is not much."""
        return False

    def pump(self) -> bool:
        """Take what there is; False at the end."""
        return self.hear() is not False

    def hear(self) -> bool | None:
        """Keep what there is; False at the end, None if there is nothing yet."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return None
        if data:
            self.voice.kept.append(data)
        if data and self.voice.live:
            self.voice.stream.feed(data)
        return bool(data)
