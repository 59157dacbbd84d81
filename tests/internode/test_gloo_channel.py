"""The channel over gloo, with works of our own."""

from __future__ import annotations

import threading
from datetime import timedelta
from unittest import mock

import pytest
import torch

from sdp_plugins.core.internode.transport import WireError
from sdp_plugins.core.nodes import Nodes
from sdp_plugins.torch.gloo_channel import Connections, GlooChannel, GlooMessage


class Work:
    """Done when told so."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error = ""

    def wait(self, limit: timedelta) -> None:
        if not self.ended.wait(min(limit.total_seconds(), 10)):
            raise RuntimeError("Timed out")
        if self.error:
            raise RuntimeError(self.error)

    def end(self, error: str = "") -> None:
        self.error = error
        self.ended.set()


NODES = Nodes(((0, 1),), ("here",))
"""Without guards."""


class Gloo:
    """A process group whose receives are these works."""

    def __init__(self, *works: Work) -> None:
        self.send = mock.Mock()
        self.recv = mock.Mock(side_effect=[*works, Work()])
        self.rank = lambda: 0
        self.size = lambda: 2


def channel_of(*works: Work) -> tuple[GlooChannel, list[GlooMessage]]:
    """A channel, and messages on it."""
    channel = GlooChannel(Connections(Gloo(*works), NODES), mock.Mock())
    memory = torch.zeros(8, dtype=torch.uint8)
    return channel, [channel.receive(1, memory.data_ptr(), 8) for _ in works]


def test_a_message_that_failed_before_anybody_waited_is_told() -> None:
    works = [Work(), Work()]
    channel, messages = channel_of(*works)
    works[0].end("connection reset by peer")
    works[1].end()
    channel.wait(messages[1:], lambda: None)
    with pytest.raises(WireError, match="connection reset"):
        channel.wait(messages, lambda: None)
    channel.close(abandon=False)


def test_a_wait_ends_with_the_last_message() -> None:
    works = [Work(), Work()]
    channel, messages = channel_of(*works)
    works[1].end()
    threading.Timer(0.1, works[0].end).start()
    channel.wait(messages, lambda: None)
    assert all(message.done for message in messages)
    channel.close(abandon=False)


def test_a_wait_is_given_up_when_its_watch_raises_whatever_gloo_does() -> None:
    work = Work()
    channel, messages = channel_of(work)
    watch = mock.Mock(side_effect=[None, KeyError("enough")])
    with pytest.raises(KeyError, match="enough"):
        channel.wait(messages, watch)
    assert channel.late(messages) == {1}
    work.end("closed")
    channel.close(abandon=True)


def test_connections_are_broken_off_where_some_are_closed_already() -> None:
    group = Gloo()
    group.size = lambda: 3
    work = mock.Mock()
    group.recv = mock.Mock(side_effect=[RuntimeError("closed"), work])
    connections = Connections(group, NODES)
    connections.break_off()
    connections.break_off()
    assert [call.args[1] for call in group.recv.call_args_list] == [1, 2]
    work.wait.assert_called_once()
