"""Which receive gets which message: first come, first served, and nothing that nobody wants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from sdp_plugins.core.internode.matching import SpanningMatching, UnwantedError
from sdp_plugins.core.internode.posted import (
    ANY,
    Envelope,
    PostedAnyReceive,
    PostedReceive,
    UnexpectedMessage,
)
from sdp_plugins.core.trace_event import NBYTES


def matching_of(*remote: int) -> SpanningMatching:
    context = SimpleNamespace(rank=0, local_ranks=(0,), remote_ranks=remote, native=mock.Mock())
    context.native.gone.return_value = []
    return SpanningMatching(context)  # type: ignore[arg-type]


def receive(source: int, tag: int, *, served_here: bool = False) -> Any:
    request = SimpleNamespace(peer=source, tag=tag, trace_event=lambda: bytes(NBYTES))
    context = SimpleNamespace(native=mock.Mock())
    operation: Any = SimpleNamespace(request=request, seq=1, context=context, end=mock.Mock())
    if source != ANY:
        return PostedReceive(operation, mock.Mock())
    operation.context.native.take_back.return_value = None
    work = mock.Mock()
    work.completed.return_value = served_here
    post = PostedAnyReceive(operation, work)
    post._claimed = not served_here
    return post


def test_the_first_that_accepts_gets_it() -> None:
    matching = matching_of(1, 2)
    posts = [receive(2, 5), receive(ANY, 6), receive(1, 5), receive(ANY, 5)]
    for post in posts:
        assert matching.add(post) is None
    assert matching.match(1, 5) == (posts[2], True)
    assert matching.match(1, 5) == (posts[3], True)
    assert matching.match(1, 7) == (posts[1], False)  # which waits behind it
    assert matching.match(2, 6) == (posts[1], True)
    with pytest.raises(UnwantedError):
        matching.match(1, 6)
    assert matching.is_wanted(2) and not matching.is_wanted(1)


def test_what_a_rank_of_this_node_has_served_is_passed_over() -> None:
    matching = matching_of(1)
    posts = [receive(ANY, 5, served_here=True), receive(ANY, 5)]
    for post in posts:
        matching.add(post)
    assert matching.match(1, 5) == (posts[1], True)
    posts[0].operation.end.assert_called_once()
    with pytest.raises(UnwantedError):
        matching.match(1, 5)


def test_unexpected_messages_are_found_in_order() -> None:
    matching = matching_of(1, 2)
    messages = [
        UnexpectedMessage(source, Envelope(8, 0, 5), np.zeros(8, np.uint8)) for source in (2, 1, 1)
    ]
    for message in messages:
        assert matching.keep_unexpected(message) is None
    assert matching.add(receive(1, 5)) is messages[1]
    assert matching.add(receive(ANY, 5)) is messages[0]
    assert matching.add(receive(ANY, 5)) is messages[2]
    late = receive(ANY, 5)
    assert matching.add(late) is None
    assert matching.keep_unexpected(messages[0]) is late  # it was posted while that was on its way


def test_who_has_left_is_waited_for_only_where_nobody_else_is() -> None:
    matching = matching_of(1, 2)
    matching.add(receive(ANY, 5))
    matching.leave([1])
    assert matching.is_wanted(2) and not matching.is_wanted(1)
    matching.leave([2])
    assert matching.is_wanted(2) and not matching.is_wanted(1)
