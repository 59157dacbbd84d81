"""Matches messages of other nodes with receives."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator

from ..errors import SdpError
from .group_context import GroupContext
from .posted import ANY, PostedReceive, UnexpectedMessage


class UnwantedError(Exception):
    """No receive waits for messages of a rank any more."""


class SpanningMatching:
    """The pending receives, in the order in which they were posted.

    A message goes to the first receive that accepts its source and tag. A message that no receive
    accepts is kept as unexpected if a receive waits behind it, and else stays with its sender.
    """

    def __init__(self, context: GroupContext) -> None:
        self.lock = threading.RLock()
        self.stopping = False
        self._context = context
        self._wanted = {rank: threading.Condition(self.lock) for rank in context.remote_ranks}
        self._waiting: list[PostedReceive] = []
        self._unexpected: list[UnexpectedMessage] = []  # in order of arrival
        self._left: list[int] = []  # ranks that have closed the group
        self._failure: SdpError | None = None
        self._failed_on_node: PostedReceive | None = None

    def add(self, post: PostedReceive) -> UnexpectedMessage | None:
        """Post a receive; returns its message instead if that has arrived already."""
        with self.lock:
            self._waiting.append(post)
            if self._failure is not None:
                self._end_all(self._failure)
            for message in self._unexpected:
                if self._take(message.source, message.envelope.tag):
                    self._unexpected.remove(message)
                    return message
            self._wake(post.peer)
            return None

    def stop(self) -> None:
        """Close: fail all receives and drop unexpected messages."""
        with self.lock:
            self.stopping = True
            self._end_all(self._context.closed_error())
            self._unexpected.clear()
            self._wake(ANY)

    def fail(self, failure: SdpError) -> None:
        """Fail all pending and later receives."""
        with self.lock:
            self._failure = self._failure or failure
            self._end_all(self._failure)

    def _end_all(self, failure: SdpError) -> None:
        waiting, self._waiting = self._waiting, []
        for post in waiting:
            if post.claim():  # else the native core has failed it, or will
                post.fail(failure)
        self._failed_on_node = None

    def _wake(self, peer: int) -> None:
        for rank in self._wanted if peer == ANY else (peer,):
            self._wanted[rank].notify()

    # ---- for the thread that receives from a rank ------------------------------------------------

    def await_want(self, source: int) -> bool:
        """Block until a receive wants a rank's message or failed; False: the group is closed."""
        with self.lock:
            while not self.stopping:
                if self.is_wanted(source) or self._failed_on_node is not None:
                    return True
                self._wanted[source].wait()
            return False

    def is_wanted(self, source: int) -> bool:
        """Whether a receive waits for messages of a rank."""
        with self.lock:
            return next(self._wanting(source), None) is not None

    def failed_on_node(self) -> PostedReceive | None:
        """A receive from any rank that failed within this node; only one caller gets it."""
        with self.lock:
            failed, self._failed_on_node = self._failed_on_node, None
            return failed

    def wanting(self, source: int) -> list[PostedReceive]:
        """The receives that wait for messages of a rank.

        Raises:
            UnwantedError: There are none.
        """
        with self.lock:
            found = list(self._wanting(source))
        if not found:
            raise UnwantedError
        return found

    def match(self, source: int, tag: int) -> tuple[PostedReceive, bool]:
        """Take the receive that a message matches.

        Returns:
            The receive, and whether it matches; if none does, the first that waits behind the
            message.

        Raises:
            UnwantedError: The message may stay with its sender.
        """
        with self.lock:
            found = self._take(source, tag)
            return (found, True) if found else (self.wanting(source)[0], False)

    def keep_unexpected(self, message: UnexpectedMessage) -> PostedReceive | None:
        """Keep a message until a receive accepts it; returns a receive that already does."""
        with self.lock:
            found = self._take(message.source, message.envelope.tag)
            if found is None and not self.stopping:
                self._unexpected.append(message)
            return found

    def leave(self, sources: Collection[int]) -> None:
        """Note ranks that have closed the group; a receive from any rank may still get messages."""
        with self.lock:
            self._left.extend(source for source in sources if source not in self._left)
            if len(self._left) == len(self._wanted):
                self._context.native.others_have_left()

    def silent(self, post: PostedReceive) -> list[int]:
        """Give up a receive from any rank.

        Returns:
            The ranks that could have sent; empty if a message has arrived.
        """
        context = self._context
        with self.lock:
            if post not in self._waiting or not post.claim():
                return []
            others = {*self._wanted, *context.local_ranks} - {context.rank}
            return sorted(others - {*self._left, *context.native.gone()} or others)

    # ---- with the lock ---------------------------------------------------------------------------

    def _wanting(self, source: int) -> Iterator[PostedReceive]:
        self._waiting = [post for post in self._waiting if not self._has_ended(post)]
        from_any = source not in self._left or self._is_last(source)
        for post in self._waiting:
            if post.peer == source or (post.peer == ANY and from_any):
                yield post

    def _has_ended(self, post: PostedReceive) -> bool:
        if post.ended:
            post.operation.end()
            if post.work.failure() is not None:
                self._failed_on_node = post
        return post.ended

    def _is_last(self, source: int) -> bool:
        """Whether all ranks have left, `source` last: then receives from any rank must fail."""
        alone = len(self._context.local_ranks) == 1 and len(self._left) == len(self._wanted)
        return alone and self._left[-1] == source

    def _take(self, source: int, tag: int) -> PostedReceive | None:
        for post in [post for post in self._waiting if post.accepts(source, tag)]:
            self._waiting.remove(post)
            if post.claim():
                return post
            post.operation.end()  # a rank of this node has sent first
        return None
