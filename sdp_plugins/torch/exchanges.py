"""all_to_all, send, recv and barriers in all of c10d's forms."""

# c10d types every form of a call as an overload; here one signature takes all of them.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from torch import Tensor

from sdp_plugins.core import CollectiveTimeoutError
from sdp_plugins.core.errors import name_ranks
from sdp_plugins.torch import debug_detail
from sdp_plugins.torch.operators import dispatched
from sdp_plugins.torch.options import UNSET, Options, how
from sdp_plugins.torch.process_group_base import ProcessGroupBase
from sdp_plugins.torch.profiling import begin
from sdp_plugins.torch.tensors import Outputs, only, readable, same_dtype, to_move
from sdp_plugins.torch.work import Work

AT_ONCE_S = 1e-3


class Exchanges(ProcessGroupBase):
    """Every rank with every other, pairs of ranks, and barriers."""

    @dispatched
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Exchange parts of one tensor; sizes are in rows, empty for equal parts."""
        same_dtype([output, input])
        received = self._elements(output, output_split_sizes, "output")
        sent = self._elements(input, input_split_sizes, "input")
        mode, copies, source = how(opts, timeout), Outputs(), readable(input)
        parts, whole = to_move(copies.dense(output)), to_move(source)
        call = self._lane().all_to_all
        start = partial(call, parts, whole, received, sent)
        return self._run("all_to_all", [start], mode, [output], [source], copies)

    alltoall_base = all_to_all_single

    @dispatched
    def alltoall(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Exchange lists of one tensor for each rank."""
        same_dtype([*output_tensors, *input_tensors])
        mode, copies = how(opts, timeout), Outputs()
        sources = [readable(tensor) for tensor in input_tensors]
        received = [to_move(copies.dense(tensor)) for tensor in output_tensors]
        sent = [to_move(tensor) for tensor in sources]
        call = self._lane().all_to_all_pieces
        start = partial(call, received, sent)
        return self._run("all_to_all", [start], mode, output_tensors, sources, copies)

    def _elements(self, tensor: Tensor, rows: Sequence[int], what: str) -> list[int]:
        """Elements that each rank sends or gets."""
        world, length = self.size(), tensor.size(0) if tensor.dim() else 1
        if not rows:
            if length % world:
                raise ValueError(
                    f"all_to_all_single cannot part {length} rows of the {what} among {world} "
                    f"ranks. Hint: pass {what}_split_sizes."
                )
            rows = [length // world] * world
        if len(rows) != world or sum(rows) != length:
            raise ValueError(
                f"{what}_split_sizes {list(rows)} do not part {length} rows among {world} ranks."
            )
        row = to_move(tensor).count // length if length else 0
        return [count * row for count in rows]

    @dispatched
    def send(self, tensors: Tensor | Sequence[Tensor], dst_rank: int, tag: int = 0) -> Work:
        """Send a tensor."""
        tensor = only(tensors)
        source = readable(tensor)
        if self._detail:
            debug_detail.log_message(self._group, "send", tensor, dst_rank, tag)
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
        """Receive a tensor from whoever sends first; the work tells who did."""
        return self._receive("recvAnySource", only(tensors), None, tag)

    def _receive(self, name: str, tensor: Tensor, src: int | None, tag: int) -> Work:
        if self._detail:
            debug_detail.log_message(self._group, "recv", tensor, src, tag)
        event = begin(name, [tensor])
        copies = Outputs()
        buffer = to_move(copies.dense(tensor))
        native = self._group.recv(buffer, src, tag, async_op=True)
        return self._track([native], [tensor], [], copies, self._message_thread, event)

    @dispatched
    def barrier(self, opts: Options = None, timeout: timedelta | None = None) -> Work:
        """Wait for all ranks."""
        return self._run("barrier", [self._lane().barrier], how(opts, timeout))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; every barrier names all that are missing, whatever the flag.

        Args:
            timeout: How long; zero does not wait. None: the group's time-out.
            wait_all_ranks: For gloo's callers.

        Raises:
            CollectiveTimeoutError: Ranks are missing; in the end, what gloo would say.
        """
        limit_s = None if timeout in (None, UNSET) else max(timeout.total_seconds(), AT_ONCE_S)
        lane = self._lane()
        if self._detail:
            debug_detail.log_call(lane, "monitored_barrier", ())
        try:
            lane.barrier(timeout_s=limit_s)
        except CollectiveTimeoutError as error:
            missing = name_ranks(map(lane.global_rank, error.ranks)).capitalize()
            error.args = (
                f"{error} Rank {lane.global_rank(self.rank())} timed out in monitoredBarrier after "
                f"{error.elapsed_s * 1000:.0f} ms: {missing} failed to pass monitoredBarrier.",
            )
            raise
