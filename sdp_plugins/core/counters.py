"""What a rank of a group has done since the group was made."""

from __future__ import annotations

import struct
from typing import NamedTuple

_LAYOUT = struct.Struct("<8Q")  # of the native FlightCounters
NBYTES = _LAYOUT.size


class Counters(NamedTuple):
    """Numbers that only grow. The ranks of a node read each other's.

    Attributes:
        operations: Collectives that have completed.
        nbytes: Bytes that they moved: of each, what the rank gave or took, whichever is more.
        busy_ns: Time in them, in which the program may have computed meanwhile.
        waiting_ns: The part of `busy_ns` in which ranks of this node had yet to begin them.
        last_arrivals: Collectives that this rank was the last of its node to begin.
        awaited_ns: In these, the time for which the first rank of the node waited for this one.
        messages: Sends and receives that have completed.
        message_nbytes: Bytes that they moved.
    """

    operations: int = 0
    nbytes: int = 0
    busy_ns: int = 0
    waiting_ns: int = 0
    last_arrivals: int = 0
    awaited_ns: int = 0
    messages: int = 0
    message_nbytes: int = 0

    @classmethod
    def unpack(cls, packed: bytes, offset: int = 0) -> Counters:
        """Read the native layout."""
        return cls._make(_LAYOUT.unpack_from(packed, offset))

    def since(self, earlier: Counters) -> Counters:
        """What was added since an earlier reading."""
        return Counters._make(max(0, now - then) for now, then in zip(self, earlier, strict=True))
