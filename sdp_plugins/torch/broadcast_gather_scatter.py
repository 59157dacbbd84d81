"""broadcast, all_gather, gather and scatter in all of c10d's forms."""

# c10d types every form of a call as an overload; here one signature takes all of them.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from torch import Tensor

from sdp_plugins.torch.operators import dispatched
from sdp_plugins.torch.options import CallOptions, Launch, Options, how, root_and_options
from sdp_plugins.torch.process_group_base import ProcessGroupBase
from sdp_plugins.torch.tensors import Outputs, only, readable, same_dtype, to_move
from sdp_plugins.torch.work import Work

Lists = Sequence[Tensor] | Sequence[Sequence[Tensor]]


def one_list(tensors: Lists) -> list[Tensor]:
    """The list of one tensor for each rank, given as it is or in a list."""
    if tensors and not isinstance(tensors[0], Tensor):
        (tensors,) = tensors
    return list(tensors)  # type: ignore[arg-type]


class BroadcastGatherScatter(ProcessGroupBase):
    """Collectives that move a rank's tensor to others."""

    @dispatched
    def broadcast(
        self,
        tensors: Tensor | Sequence[Tensor],
        opts: Options = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Copy the root's tensor to all ranks."""
        tensor = only(tensors)
        rank, mode = root_and_options(root if opts is None else opts, timeout)
        copies, receives = Outputs(), self.rank() != rank
        buffer = to_move(copies.dense(tensor) if receives else readable(tensor))
        start = partial(self._lane().broadcast, buffer, rank)
        return self._run("broadcast", [start], mode, [tensor], copies=copies if receives else None)

    @dispatched
    def allgather(
        self,
        output_tensors: Lists,
        input_tensors: Tensor | Sequence[Tensor],
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Gather every rank's tensor in lists of one tensor for each rank."""
        outputs = one_list(output_tensors)
        return self._gather_each([outputs], [only(input_tensors)], how(opts, timeout))

    @dispatched
    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Gather several tensors of every rank; all ranks' are of the same sizes.

        `output_lists` has a list for each rank, with a tensor for each of `input_list`.
        """
        if len(output_lists) != self.size() or {len(o) for o in output_lists} != {len(input_list)}:
            raise ValueError(
                f"all_gather_coalesced of {len(input_list)} tensors needs as many outputs in each "
                f"of {self.size()} lists, not {[len(outputs) for outputs in output_lists]}."
            )
        sizes = [tuple(tensor.shape) for tensor in input_list]
        for rank, outputs in enumerate(output_lists):
            if [tuple(tensor.shape) for tensor in outputs] != sizes:
                raise ValueError(
                    f"all_gather_coalesced needs outputs of its inputs' sizes {sizes}, but those "
                    f"of rank {rank} are of {[tuple(tensor.shape) for tensor in outputs]}."
                )
        by_tensor = list(zip(*output_lists, strict=True))
        return self._gather_each(by_tensor, input_list, how(opts, timeout))

    def _gather_each(
        self,
        outputs_of: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        mode: CallOptions,
    ) -> Work:
        """all_gather of several tensors, each with one output for every rank."""
        operations = [(*outs, source) for outs, source in zip(outputs_of, input_list, strict=True)]
        copies, lane = Outputs(operations), self._lane()
        sources = [readable(tensor) for tensor in input_list]
        starts: list[Launch] = []
        for outputs, source in zip(outputs_of, sources, strict=True):
            same_dtype([*outputs, source])
            parts = [to_move(copies.dense(tensor)) for tensor in outputs]
            gather = lane.all_gather_uneven
            starts.append(partial(gather, parts, to_move(source)))
        flat = [tensor for outputs in outputs_of for tensor in outputs]
        return self._run("all_gather", starts, mode, flat, sources, copies)

    @dispatched
    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Gather every rank's tensor in one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts, timeout)

    @dispatched
    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """all_gather_single of several tensors."""
        pairs = list(zip(outputs, inputs, strict=True))
        mode, copies, lane = how(opts, timeout), Outputs(pairs), self._lane()
        sources = [readable(tensor) for tensor in inputs]
        starts: list[Launch] = []
        for output, source in zip(outputs, sources, strict=True):
            same_dtype([output, source])
            self._check_parts("all_gather", output, source)
            whole = to_move(copies.dense(output))
            starts.append(partial(lane.all_gather, whole, to_move(source)))
        return self._run("all_gather", starts, mode, outputs, sources, copies)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @dispatched
    def gather(
        self,
        output_tensors: Lists,
        input_tensors: Tensor | Sequence[Tensor],
        opts: Options = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Gather every rank's tensor on the root."""
        rank, mode = root_and_options(root if opts is None else opts, timeout)
        source, copies = readable(only(input_tensors)), Outputs()
        outputs = one_list(output_tensors) if self.rank() == rank else []
        same_dtype([*outputs, source])
        parts = [to_move(copies.dense(tensor)) for tensor in outputs] or None
        gather = self._lane().gather
        start = partial(gather, parts, to_move(source), rank)
        return self._run("gather", [start], mode, outputs, [source], copies)

    @dispatched
    def scatter(
        self,
        output_tensors: Tensor | Sequence[Tensor],
        input_tensors: Lists,
        opts: Options = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Give every rank its tensor of the root's list."""
        rank, mode = root_and_options(root if opts is None else opts, timeout)
        output, copies = only(output_tensors), Outputs()
        inputs = one_list(input_tensors) if self.rank() == rank else []
        sources = [readable(tensor) for tensor in inputs]
        same_dtype([output, *sources])
        mine, parts = to_move(copies.dense(output)), [to_move(tensor) for tensor in sources] or None
        start = partial(self._lane().scatter, mine, parts, rank)
        return self._run("scatter", [start], mode, [output], sources, copies)
