"""The channel over gloo, with works of our own."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch

from sdp_plugins.core.internode.wire import WireError
from sdp_plugins.torch.gloo_network import GlooChannel


class Work:
    """Done when told so."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error = ""

    def wait(self, limit: Any = None) -> None:
        assert self.ended.wait(10)
        if self.error:
            raise RuntimeError(self.error)

    def end(self, error: str = "") -> None:
        self.error = error
        self.ended.set()


def test_a_message_that_failed_before_anybody_waited_is_told() -> None:
    works = [Work(), Work()]
    group = mock.Mock()
    group.recv.side_effect = works
    channel = GlooChannel(group, mock.Mock())
    memory = torch.zeros(8, dtype=torch.uint8)
    messages = [channel.receive(1, memory.data_ptr(), 8) for _ in works]
    works[0].end("connection reset by peer")
    works[1].end()
    end = time.monotonic() + 10
    while not messages[1].done and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(WireError, match="connection reset"):
        channel.wait(messages, lambda: None)
    with pytest.raises(WireError, match="connection reset"):
        channel.done(messages)
    channel.close(abandon=False)
