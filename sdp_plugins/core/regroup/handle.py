"""The address of a rank's process, at which others reach it as long as it lives."""

from __future__ import annotations

from typing import NamedTuple


class Handle(NamedTuple):
    """Where a process listens.

    Attributes:
        host: An address of its host.
        port: Of its listener.
        secret: Known to the ranks of the job; whoever connects presents it.
    """

    host: str
    port: int
    secret: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.secret}"

    @property
    def where(self) -> str:
        """Without the secret, for messages."""
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Read what ``str`` wrote.

        Raises:
            ValueError: The text is something else.
        """
        place, _, secret = text.partition("/")
        host, _, port = place.rpartition(":")
        if not (host and secret and port.isdecimal() and 0 < int(port) < 2**16):
            raise ValueError(f"{text!r} is no handle of a rank: HOST:PORT/SECRET")
        return cls(host, int(port), secret)
