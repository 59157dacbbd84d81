"""What a rank that gives up tells the ranks of other nodes."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
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
_NOBODY = -1
_SENDER = re.compile(rb'{"rank": (\d{1,9})\b')  # what `pack` writes first


@dataclass(frozen=True)
class Notice:
    """A failure on its way to other nodes.

    Attributes:
        rank: Who gives up; negative if that cannot be read.
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
        """As ``NOTICE_NBYTES`` bytes, with as much of the text as there is room for."""
        room = NOTICE_NBYTES - len(replace(self, text="")._as_json())
        fitting = replace(self, text=_beginning(encodable(self.text), room))
        return fitting._as_json().ljust(NOTICE_NBYTES)

    def _as_json(self) -> bytes:
        return json.dumps(asdict(self), ensure_ascii=False).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Notice:
        """Read what ``pack`` wrote; never raises, because somebody has failed in any case."""
        try:
            fields = json.loads(data)
            ranks = tuple(map(int, fields["ranks"]))
            kind, text = (encodable(str(fields[name])) for name in ("kind", "text"))
            return cls(int(fields["rank"]), kind, ranks, text)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            found = _SENDER.match(data)
            rank = int(found[1]) if found else _NOBODY
            return cls(rank, "aborted", (rank,), "what it says cannot be read")

    def error(self, call: Call) -> SdpError:
        """What the failure is to an operation here."""
        kind, nodes = _KINDS.get(self.kind, PeerLostError), call.here.nodes
        known = range(nodes.world_size)
        who = nodes.name([self.rank]) if self.rank in known else "a rank of another node"
        text = self.text.removeprefix(f"{call.title}: ")
        ranks = [rank for rank in self.ranks if rank in known]
        return call.error(kind, f"{who} gave up: {text}", ranks)


def encodable(text: str) -> str:
    """The text with escapes for what no encoding has, such as a file's name that is not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _beginning(text: str, room: int) -> str:
    """As many characters as take so many bytes in JSON."""
    sizes = (len(json.dumps(char, ensure_ascii=False).encode()) - len('""') for char in text)
    return text[: sum(end <= room for end in accumulate(sizes))]


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
    text = encodable(str(error))
    return kind, text, list(error.ranks), error.op, max(error.seq, 0), error.elapsed_s
