"""What a rank that gives up tells the ranks of other nodes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    SdpError,
    SharedMemoryError,
)

if TYPE_CHECKING:
    from .call import Call

NOTICE_NBYTES = 1024
_MOST_TEXT = 600
_MOST_RANKS = 8
_KINDS: dict[str, type[SdpError]] = {
    "timeout": CollectiveTimeoutError,
    "mismatch": CollectiveMismatchError,
    "shared_memory": SharedMemoryError,
    "peer_lost": PeerLostError,
}


@dataclass(frozen=True)
class Notice:
    """A failure on its way to other nodes.

    Attributes:
        rank: Who gives up.
        kind: Native name of the kind of failure.
        ranks: Who is to blame.
        text: Why, without this rank's name before it and without the hint.
    """

    rank: int
    kind: str
    ranks: tuple[int, ...]
    text: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Notice:
        """Describe a failure of this rank."""
        text = str(error)
        if text.startswith("[rank "):
            text = text.partition("] ")[2]
        for end in (" (last completed: ", " Hint: "):
            text = text.partition(end)[0]
        ranks = error.ranks if isinstance(error, SdpError) else ()
        return cls(
            rank, kind_of(error), ranks[:_MOST_RANKS] or (rank,), text.rstrip(".")[:_MOST_TEXT]
        )

    def pack(self) -> bytes:
        """As ``NOTICE_NBYTES`` bytes."""
        packed = json.dumps(asdict(self)).encode()
        if len(packed) > NOTICE_NBYTES:  # of characters that JSON writes at length
            packed = json.dumps(asdict(self) | {"text": self.text[:100]}).encode()
        return packed.ljust(NOTICE_NBYTES)

    @classmethod
    def unpack(cls, data: bytes) -> Notice:
        """Read what ``pack`` wrote."""
        fields = json.loads(data)
        return cls(fields["rank"], fields["kind"], tuple(fields["ranks"]), fields["text"])

    def error(self, call: Call) -> SdpError:
        """What the failure is to an operation here."""
        kind = _KINDS.get(self.kind, PeerLostError)
        who = call.here.nodes.name([self.rank])
        text = self.text.removeprefix(f"{call.title}: ")
        return call.error(kind, f"{who} gave up: {text}", self.ranks)


def kind_of(error: BaseException, otherwise: str = "aborted") -> str:
    """Native name of an error's kind."""
    for kind, known in _KINDS.items():
        if isinstance(error, known):
            return kind
    return otherwise


def failure_fields(
    error: SdpError, otherwise: str = "closed"
) -> tuple[str, str, list[int], str, int, float]:
    """A failure as the native core takes it; `otherwise`: its kind, if it has none of its own."""
    kind = kind_of(error, otherwise)
    return kind, str(error), list(error.ranks), error.op, max(error.seq, 0), error.elapsed_s
