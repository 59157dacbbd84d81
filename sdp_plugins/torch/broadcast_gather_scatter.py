"""broadcast, all_gather, gather and scatter in all forms of c10d."""

# c10d types each form of a call as an overload; here one signature accepts all of them.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from torch import Tensor

from sdp_plugins.torch.options import CallOptions, Launch, Options, call_options, root_and_options
from sdp_plugins.torch.process_group_lifecycle import ProcessGroupBase
from sdp_plugins.torch.tensors import Outputs, only, readable, same_dtype, tensor_of, to_move
from sdp_plugins.torch.torch_dispatch import dispatched
from sdp_plugins.torch.work import Work

Lists = Sequence[Tensor] | Sequence[Sequence[Tensor]]


def one_list(tensors: Lists) -> list[Tensor]:
    """Return the list of one tensor for each rank, passed as it is or within a list."""
    if tensors and not isinstance(tensors[0], Tensor):
        (tensors,) = tensors
    return list(tensors)  # type: ignore[arg-type]


class BroadcastGatherScatter(ProcessGroupBase):
    """Collectives that copy tensors between ranks."""

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
        rank, options = root_and_options(root if opts is None else opts, timeout)
        copies = Outputs() if self.rank() != rank else None
        buffer = to_move(readable(tensor) if copies is None else copies.dense(tensor))
        launch = partial(self._current_group().broadcast, buffer, rank)
        return self._run("broadcast", [launch], options, [tensor], copies=copies)

    @dispatched
    def allgather(
        self,
        output_tensors: Lists,
        input_tensors: Tensor | Sequence[Tensor],
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Gather every rank's tensor into lists of one tensor for each rank."""
        outputs = one_list(output_tensors)
        return self._gather_each([outputs], [only(input_tensors)], call_options(opts, timeout))

    @dispatched
    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Gather several tensors of every rank; sizes are equal on all ranks.

        `output_lists` holds a list for each rank, with a tensor for each of `input_list`.
        """
        if len(output_lists) != self.size() or {len(o) for o in output_lists} != {len(input_list)}:
            raise ValueError(
                f"all_gather_coalesced of {len(input_list)} tensors needs as many outputs in each "
                f"of {self.size()} lists, not {[len(outputs) for outputs in output_lists]}."
            )
        sizes = [tuple(tensor_of(tensor).shape) for tensor in input_list]
        for rank, outputs in enumerate(output_lists):
            if [tuple(tensor_of(tensor).shape) for tensor in outputs] != sizes:
                raise ValueError(
                    f"all_gather_coalesced needs outputs of its inputs' sizes {sizes}, but those "
                    f"of rank {rank} are of {[tuple(tensor.shape) for tensor in outputs]}."
                )
        by_tensor = list(zip(*output_lists, strict=True))
        return self._gather_each(by_tensor, input_list, call_options(opts, timeout))

    def _gather_each(
        self,
        outputs_of: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        options: CallOptions,
    ) -> Work:
        """Run all_gather for several tensors, each with one output for every rank."""
        operations = [(*outs, source) for outs, source in zip(outputs_of, input_list, strict=True)]
        copies, gather = Outputs(operations), self._current_group().all_gather_uneven
        sources = [readable(tensor) for tensor in input_list]
        launches: list[Launch] = []
        for outputs, source in zip(outputs_of, sources, strict=True):
            same_dtype([*outputs, source])
            parts = [to_move(copies.dense(tensor)) for tensor in outputs]
            launches.append(partial(gather, parts, to_move(source)))
        flat = [tensor for outputs in outputs_of for tensor in outputs]
        return self._run("all_gather", launches, options, flat, sources, copies)

    @dispatched
    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Gather every rank's tensor into one tensor."""
        return self._all_gather_pairs([output], [input], call_options(opts, timeout))

    @dispatched
    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Run all_gather_single for several tensors."""
        return self._all_gather_pairs(outputs, inputs, call_options(opts, timeout))

    def _all_gather_pairs(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: CallOptions
    ) -> Work:
        self._check_parts("all_gather", outputs, inputs)
        launch, pairs = self._current_group().all_gather, (outputs, inputs)
        return self._run_pairs("all_gather", launch, pairs, options, to_move)

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
        rank, options = root_and_options(root if opts is None else opts, timeout)
        source, copies = readable(only(input_tensors)), Outputs()
        outputs = one_list(output_tensors) if self.rank() == rank else []
        same_dtype([*outputs, source])
        parts = [to_move(copies.dense(tensor)) for tensor in outputs] or None
        launch = partial(self._current_group().gather, parts, to_move(source), rank)
        return self._run("gather", [launch], options, outputs, [source], copies)

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
        """Send every rank its tensor of the root's list."""
        rank, options = root_and_options(root if opts is None else opts, timeout)
        output, copies = only(output_tensors), Outputs()
        inputs = one_list(input_tensors) if self.rank() == rank else []
        sources = [readable(tensor) for tensor in inputs]
        same_dtype([output, *sources])
        mine, parts = to_move(copies.dense(output)), [to_move(tensor) for tensor in sources] or None
        launch = partial(self._current_group().scatter, mine, parts, rank)
        return self._run("scatter", [launch], options, [output], sources, copies)
