"""all_to_all in all forms of c10d."""

# c10d types each form of a call as an overload; here one signature accepts all of them.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from torch import Tensor

from sdp_plugins.torch.options import Options, call_options
from sdp_plugins.torch.process_group_lifecycle import ProcessGroupBase
from sdp_plugins.torch.tensors import Outputs, readable, same_dtype, to_move
from sdp_plugins.torch.torch_dispatch import dispatched
from sdp_plugins.torch.work import Work


class AllToAll(ProcessGroupBase):
    """Collectives in which every rank exchanges data with every other rank."""

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
        """Exchange parts of one tensor; split sizes are in rows, empty for equal parts."""
        same_dtype([output, input])
        copies, source = Outputs(), readable(input)
        parts, whole = to_move(copies.dense(output)), to_move(source)
        received = self._elements(output, parts.count, output_split_sizes, "output")
        sent = self._elements(input, whole.count, input_split_sizes, "input")
        launch = partial(self._current_group().all_to_all, parts, whole, received, sent)
        options = call_options(opts, timeout)
        return self._run("all_to_all", [launch], options, [output], [source], copies)

    alltoall_base = all_to_all_single

    @dispatched
    def alltoall(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Exchange lists that hold one tensor for each rank."""
        same_dtype([*output_tensors, *input_tensors])
        options, copies = call_options(opts, timeout), Outputs()
        sources = [readable(tensor) for tensor in input_tensors]
        received = [to_move(copies.dense(tensor)) for tensor in output_tensors]
        sent = [to_move(tensor) for tensor in sources]
        call = self._current_group().all_to_all_pieces
        launch = partial(call, received, sent)
        return self._run("all_to_all", [launch], options, output_tensors, sources, copies)

    def _elements(self, tensor: Tensor, count: int, rows: Sequence[int], what: str) -> list[int]:
        """Return how many of the `count` elements each rank sends or receives."""
        world, length = self.size(), tensor.size(0) if tensor.dim() else 1
        if not rows:
            if length % world:
                raise ValueError(
                    f"all_to_all_single cannot divide {length} rows of the {what} among "
                    f"{world} ranks. Hint: pass {what}_split_sizes."
                )
            rows = [length // world] * world
        if len(rows) != world or sum(rows) != length:
            raise ValueError(
                f"{what}_split_sizes {list(rows)} do not add up to {length} rows. "
                f"Hint: give each of the {world} ranks its number of rows."
            )
        row = count // length if length else 0
        return [count * row for count in rows]
