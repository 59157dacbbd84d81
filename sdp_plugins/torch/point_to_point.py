"""send and recv."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sdp_plugins.torch.process_group_lifecycle import ProcessGroupBase
from sdp_plugins.torch.profiling import begin
from sdp_plugins.torch.tensors import Outputs, only, readable, to_move
from sdp_plugins.torch.torch_dispatch import dispatched
from sdp_plugins.torch.work import Work


class PointToPoint(ProcessGroupBase):
    """Messages between two ranks."""

    @dispatched
    def send(self, tensors: Tensor | Sequence[Tensor], dst_rank: int, tag: int = 0) -> Work:
        """Send a tensor."""
        tensor = only(tensors)
        source = readable(tensor)
        event = begin("send", [tensor])
        native = self._group.send(to_move(source), dst_rank, tag, async_op=True)
        assert native is not None
        return self._track([native], [tensor], [source], None, self._message_thread, event)

    @dispatched
    def recv(self, tensors: Tensor | Sequence[Tensor], src_rank: int, tag: int = 0) -> Work:
        """Receive a tensor."""
        return self._receive("recv", only(tensors), src_rank, tag)

    @dispatched
    def recv_anysource(self, tensors: Tensor | Sequence[Tensor], tag: int = 0) -> Work:
        """Receive a tensor from any rank; the work reports the sender."""
        return self._receive("recvAnySource", only(tensors), None, tag)

    def _receive(self, name: str, tensor: Tensor, src: int | None, tag: int) -> Work:
        copies = Outputs()
        buffer = to_move(copies.dense(tensor))
        event = begin(name, [tensor])
        native = self._group.recv(buffer, src, tag, async_op=True)
        return self._track([native], [tensor], [], copies, self._message_thread, event)
