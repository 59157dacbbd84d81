"""Receives from other nodes that are posted, and messages that are not expected yet."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

import numpy as np

from .. import _native
from ..errors import CollectiveMismatchError, SdpError
from .issued import IssuedOperation

_ENVELOPE = struct.Struct("<QII")
ANY = -1


@dataclass(frozen=True)
class Envelope:
    """The header before the data of each message.

    Attributes:
        nbytes: Bytes of its data.
        dtype: Type of its data.
        tag: Its tag.
    """

    nbytes: int
    dtype: int
    tag: int

    SIZE = _ENVELOPE.size

    def pack(self) -> bytearray:
        """Encode as bytes."""
        return bytearray(_ENVELOPE.pack(self.nbytes, self.dtype, self.tag))

    @classmethod
    def unpack(cls, data: bytearray) -> Envelope:
        """Decode the bytes of ``pack``."""
        return cls(*_ENVELOPE.unpack(data))


class PostedReceive(IssuedOperation):
    """A receive from one rank of another node."""

    @property
    def peer(self) -> int:
        """The sending rank; ``ANY``: any rank."""
        return self.operation.request.peer

    @property
    def ended(self) -> bool:
        """Whether a rank of this node has served it."""
        return False

    def accepts(self, source: int, tag: int) -> bool:
        """Whether it matches a message by source and tag."""
        return self.peer in (source, ANY) and self.operation.request.tag == tag

    def claim(self) -> bool:
        """Reserve it for a message of another node; False: a rank of this node has served it."""
        return True

    def fail(self, failure: SdpError) -> None:
        """Fail it; a receive that never began has waited since its call."""
        self.started_ns = self.started_ns or self.issued_ns
        super().fail(failure)

    def begin(self, source: int, envelope: Envelope) -> None:
        """Note that its message begins to arrive.

        Raises:
            CollectiveMismatchError: The message has another size or type.
        """
        self.start()
        _, nbytes = self.room
        if envelope.nbytes == nbytes and envelope.dtype == int(self.operation.request.dtype):
            return
        sent = _native.DType(envelope.dtype)
        count = envelope.nbytes // _native.itemsize(sent)
        what = f"{self.operation.context.nodes.name([source])} sends {sent.name}[{count}]"
        raise self.operation.error(CollectiveMismatchError, what, [source])

    @property
    def room(self) -> tuple[int, int]:
        """Address and bytes of its memory."""
        ((address, count),) = self.operation.request.recvs
        return address, count * self.operation.itemsize


@dataclass(eq=False)
class PostedAnyReceive(PostedReceive):
    """A receive from any rank, which the ranks of this node may serve as well.

    The native core has posted it within the node, and finishes its work unless ``claim`` comes
    first.
    """

    _claimed: bool = False

    def __post_init__(self) -> None:
        """Nothing yet: the native core records it until ``claim``."""

    @property
    def ended(self) -> bool:
        """Whether the native core has completed it."""
        return not self._claimed and self.work.completed()

    def claim(self) -> bool:
        """Take it back from the native core; False: a rank of this node has begun to serve it."""
        if not self._claimed:
            ticket = self.operation.context.native.take_back(self.work)
            if ticket is None:
                return False
            self._claimed, self.ticket = True, ticket
            self._show(self._event())
        return True


@dataclass(eq=False)
class UnexpectedMessage:
    """A message that arrived before its receive was posted.

    Attributes:
        source: The rank that has sent it.
        envelope: Its envelope.
        data: Its bytes.
    """

    source: int
    envelope: Envelope
    data: np.ndarray

    def deliver(self, post: PostedReceive) -> None:
        """Complete its receive with its data."""
        post.begin(self.source, self.envelope)
        address, nbytes = post.room
        ctypes.memmove(address, _native.address(self.data), nbytes)
        post.operation.end()
        post.finish(self.source)
