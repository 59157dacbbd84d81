"""all_reduce, reduce and reduce_scatter in all forms of c10d."""

# c10d types each form of a call as an overload; here one signature accepts all of them.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp_plugins.core import ReduceOp
from sdp_plugins.torch.bucket_registration import MIN_BYTES
from sdp_plugins.torch.ddp_reducer import called_by_reducer, joining, wait_in_python
from sdp_plugins.torch.groups import smddp_group
from sdp_plugins.torch.internals import count_modes, profiling
from sdp_plugins.torch.options import CallOptions, Launch, Options, op_and_options, root_and_options
from sdp_plugins.torch.process_group_lifecycle import ProcessGroupBase
from sdp_plugins.torch.reduce_ops import core_op
from sdp_plugins.torch.sparse import SparseSum, check
from sdp_plugins.torch.tensors import (
    Outputs,
    address,
    is_dense,
    is_on_accelerator,
    only,
    readable,
    same_dtype,
    to_reduce,
)
from sdp_plugins.torch.torch_dispatch import OwnDispatchError, dispatched, through_operators
from sdp_plugins.torch.work import Work


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


class Reductions(ProcessGroupBase):
    """Collectives that reduce."""

    def allreduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        opts: Options = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Work:
        """Reduce a tensor over all ranks in place; a sparse tensor becomes the sum."""
        hooks = self.hooks
        if hooks is not None and not hooks.passed:
            by_reducer = hooks.by_reducer = called_by_reducer()
            work = hooks.call("allreduce", tensors, **_given(opts=opts, op=op, timeout=timeout))
            first = tensors if isinstance(tensors, Tensor) else tensors[0]
            return self._kept(work, first, by_reducer)
        try:
            tensor = None if count_modes() else only(tensors)
        except OwnDispatchError:
            tensor = None
        if tensor is None:  # not `dispatched`, as the reducer is found by the number of frames
            given = _given(opts=opts, op=op, timeout=timeout)
            return through_operators(Reductions.allreduce, self, tensors, **given)
        kind, options = op_and_options(op if opts is None else opts, timeout)
        if tensor.layout is not torch.strided or not is_dense(tensor):
            if tensor.layout is torch.sparse_coo:
                work = self._sum_sparse(tensor, kind, options)
            else:
                work = self._reduce_all([tensor], kind, options)
            return self._kept(work, tensor, called_by_reducer())
        group = self._current_group()
        if tensor.nbytes >= MIN_BYTES and group is self._group:
            by_reducer = called_by_reducer() if hooks is None else hooks.by_reducer
            self._registrations.see(tensor, by_reducer, self._in_flight)
        buffer, reduction = to_reduce(tensor), core_op(kind)
        if options[0] or self._detail or profiling():
            launch = partial(group.all_reduce, buffer, reduction)
            work = self._run("all_reduce", [launch], options, [tensor])
            return self._kept(work, tensor, called_by_reducer())
        group.all_reduce(buffer, reduction, timeout_s=options[1])
        if self._works:
            self._forget_done()  # all earlier works are done by now
        return Work((tensor,), self._callback_thread)

    def _kept(self, work: Work, tensor: Tensor, by_reducer: bool) -> Work:
        """Return a work of which DDP's C++ may keep only its own half."""
        if by_reducer:
            wait_in_python(work.wait)
        elif tensor.numel() == 1 and (module := joining()) is not None:
            self._of_join[module] = work  # until the next one, as in the module's reducer
        return work

    @dispatched
    def allreduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Reduce several tensors over all ranks in place."""
        return self._reduce_all(tensors, *op_and_options(opts, timeout))

    def _sum_sparse(self, tensor: Tensor, kind: Any, options: CallOptions) -> Work:
        check(tensor, kind)
        if is_on_accelerator(tensor):
            return self.call_on_device(Reductions._sum_sparse, (tensor, kind, options), {})
        entries = SparseSum(tensor, self._current_group(), options[1])
        launches = entries.launches
        return self._run("sparse_all_reduce", launches, options, [tensor], copies=entries)

    def _reduce_all(self, tensors: Sequence[Tensor], kind: Any, options: CallOptions) -> Work:
        same_dtype(tensors)
        if is_on_accelerator(tensors[0]):
            return self._reduce_on_device(tensors, core_op(kind), options[1])
        copies, op, group = Outputs([[t] for t in tensors]), core_op(kind), self._current_group()
        buffers = [to_reduce(copies.dense(tensor)) for tensor in tensors]
        launches = [partial(group.all_reduce, buffer, op) for buffer in buffers]
        return self._run("all_reduce", launches, options, tensors, copies=copies)

    @dispatched
    def reduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        opts: Options = None,
        op: Any = dist.ReduceOp.SUM,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Reduce a tensor over all ranks into the root's; the other ranks' stay unchanged."""
        tensor = only(tensors)
        rank, options = root_and_options(root if opts is None else opts, timeout)
        reduction, copies = core_op(getattr(opts, "reduceOp", op)), Outputs()
        buffer = to_reduce(copies.dense(tensor))
        launch = partial(self._current_group().reduce, buffer, rank, reduction)
        received = copies if self.rank() == rank else None
        return self._run("reduce", [launch], options, [tensor], copies=received)

    @dispatched
    def reduce_scatter(
        self,
        output_tensors: Tensor | Sequence[Tensor],
        input_tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Reduce lists of one tensor for each rank; every rank keeps its own entry."""
        if not isinstance(output_tensors, Tensor):
            (input_tensors,) = input_tensors  # type: ignore[assignment]
        self._refuse_feedback()
        output = only(output_tensors)
        inputs = [readable(tensor) for tensor in input_tensors]  # type: ignore[arg-type]
        kind, options = op_and_options(opts, timeout)
        op, group, copies = core_op(kind), self._current_group(), Outputs()
        if len({tensor.numel() for tensor in inputs}) > 1:
            launches = self._reduce_to_each(output, inputs, op, copies)
        else:
            parts = [to_reduce(tensor) for tensor in inputs]
            mine = to_reduce(copies.dense(output))
            launches = [partial(group.reduce_scatter, mine, parts, op)]
        return self._run("reduce_scatter", launches, options, [output], inputs, copies)

    def _reduce_to_each(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: ReduceOp,
        copies: Outputs,
    ) -> list[Launch]:
        """Run reduce_scatter of parts that differ in size as one reduce to each rank."""
        same_dtype([output, *inputs])
        rank, sizes = self.rank(), [tensor.numel() for tensor in inputs]
        if len(sizes) != self.size() or sizes[rank] != output.numel():
            raise ValueError(
                f"reduce_scatter needs {self.size()} tensors, and {output.numel()} elements for "
                f"this rank, not {sizes}. Hint: pass one tensor for each rank, and an output of "
                "this rank's size."
            )
        mine = inputs[rank].detach().clone()
        copies.copy_later(output, mine)
        reduce = self._current_group().reduce
        parts = [*inputs[:rank], mine, *inputs[rank + 1 :]]
        return [partial(reduce, to_reduce(part), root, op) for root, part in enumerate(parts)]

    @dispatched
    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Reduce a tensor of world_size equal parts; every rank keeps its own part."""
        return self._reduce_scatter_pairs([output], [input], *op_and_options(opts, timeout))

    @dispatched
    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Run reduce_scatter_single for several tensors."""
        return self._reduce_scatter_pairs(outputs, inputs, *op_and_options(opts, timeout))

    def _refuse_feedback(self) -> None:
        """Refuse what FSDP would spoil: its buffers are temporary, and residuals belong to one."""
        group = self._current_group()
        wire = group.wire_dtype
        if wire is not None and wire.feedback and group.nodes.count > 1:
            raise ValueError(
                f"reduce_scatter over the wire dtype {str(wire)!r}: the next tensor at this "
                "address would get what rounding has left out of this one. Hint: with FSDP, use "
                f"{wire.name!r} or '{wire.name} stochastic'."
            )

    def _reduce_scatter_pairs(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], kind: Any, options: CallOptions
    ) -> Work:
        self._refuse_feedback()
        self._check_parts("reduce_scatter", inputs, outputs)
        launch, pairs = self._current_group().reduce_scatter, (outputs, inputs)
        return self._run_pairs("reduce_scatter", launch, pairs, options, to_reduce, core_op(kind))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def share(self, tensor: Tensor) -> None:
        """Move a tensor's storage into shared memory; see `sdp_plugins.torch.share`."""
        if readable(tensor) is not tensor:
            raise ValueError("The tensor is not contiguous. Hint: share tensor.contiguous().")
        address(tensor)
        if tensor.nbytes >= MIN_BYTES:
            self._current_group()  # drops registrations of freed storages
            self._registrations.share(tensor, self._in_flight)

    def _in_flight(self, storage: int) -> bool:
        """Return whether any group of this process has an operation in flight on the storage."""
        groups = [self, *map(smddp_group, dist.distributed_c10d._world.pg_map)]
        return any(group.uses(storage) for group in groups if group is not None)
