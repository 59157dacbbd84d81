"""`LocalUpdates`: ranks train by themselves, and average what they have learnt now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.core.local_updates import updates
from sdp_plugins.core.local_updates.background import background
from sdp_plugins.core.local_updates.outer_step import OuterStep
from sdp_plugins.core.local_updates.parameters import Floats, describe, divide
from sdp_plugins.core.local_updates.schedule import Schedule
from sdp_plugins.core.local_updates.wire import parse_wire
from sdp_plugins.torch.backend_name import BACKEND
from sdp_plugins.torch.group_options import Options
from sdp_plugins.torch.groups import core_group
from sdp_plugins.torch.sharding.buffers import broadcast
from sdp_plugins.torch.sharding.checks import parameters_of
from sdp_plugins.torch.sharding.gradients import is_sharded
from sdp_plugins.torch.tensors import overlap

_OPEN: WeakSet[LocalUpdates] = WeakSet()
"""Those that exchange parameters."""


class LocalUpdates:
    """Has the ranks exchange parameters every so many steps, in place of gradients in each one.

    ::

        optimizer = torch.optim.AdamW(model.parameters())
        local = LocalUpdates(model, optimizer, every=30, wire="int8")
        ...  # the loop, unchanged
        local.synchronize()

    Each rank trains on its data alone. Every `every` steps the ranks take an outer step
    (`OuterStep`) from the parameters on which they last agreed: an average of what each has gained.
    The optimizer's own state stays with each rank. docs/slow-networks.md compares the forms.

    Inside a node, average gradients in every step: wrap the model by
    ``DistributedDataParallel(model, process_group=inner)``, where ``inner, _ =
    dist.new_subgroups(ranks_per_node)``. Then only nodes differ.

    An outer step sends each parameter twice, up to the ranks' shards and back, in as many bytes as
    `wire` says: 2 n (N - 1) / N values for n parameters and N nodes. In memory it takes, on each
    rank, 4 bytes per parameter, 4 per parameter of the largest fragment, and 4 on one rank only.

    Args:
        model: The model, whose parameters require gradients now or never. All ranks begin with
            rank 0's parameters and buffers, and take its buffers over in each round.
        optimizer: Whose steps count; of several, the one that steps last.
        every: Steps from one outer step to the next one.
        outer: ``"average"`` (local SGD), ``"nesterov"`` (DiLoCo), or an `OuterStep`.
        wire: How values travel between nodes: ``"int8"``, ``"int4"``, ``"fp8"``, ``"bf16"`` or
            ``"fp16"``; None: exactly.
        fragments: Number of parts of the model that take their outer steps in turn, within `every`
            steps. Douillard et al., 2025, do this with a `delay`.
        delay: Steps that a rank goes on while its parameters travel; at most `every // fragments`.
            What it learns in them it keeps.
        group: A process group; None: the default group. All ranks of it must make the object, in
            the same order among groups.

    Raises:
        ValueError: The arguments do not fit together.
        CollectiveMismatchError: The ranks' arguments or models differ.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 30,
        outer: OuterStep | str = "average",
        wire: str | None = None,
        fragments: int = 1,
        delay: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        schedule = Schedule(every, fragments, delay)
        step = OuterStep.parse(outer)
        options = Options(parse_wire(wire))
        _check_model(model, group)
        _check_optimizer(model, optimizer)
        self._parameters = parameters = _ModelParameters(model, fragments)
        _check_others(parameters)
        parent = core_group(group)
        with background():
            self._group: Any = dist.new_group(
                dist.get_process_group_ranks(group or dist.group.WORLD),
                timeout=None if parent is None else timedelta(seconds=parent.timeout_s),
                backend=BACKEND,
                pg_options=options,
                use_local_synchronization=group is not None,
            )
        core: Any = core_group(self._group)
        core.describe("local updates")

        def share_buffers() -> None:
            broadcast(core, list(model.buffers()))

        try:
            self._updates = updates.LocalUpdates(core, parameters, schedule, step, share_buffers)
            broadcast(core, [one for one in model.parameters() if not one.requires_grad])
            self._updates.share()
        except BaseException:
            self._leave_group()
            raise
        self._hook = optimizer.register_step_post_hook(self._after_step)
        _OPEN.add(self)

    @property
    def steps(self) -> int:
        """Steps of the optimizer so far."""
        return self._updates.steps

    def synchronize(self) -> None:
        """Make the ranks' parameters their average; a collective.

        For example at the end of the training, or before an evaluation. It is no outer step: the
        momenta stay as they are, and a second call changes nothing.
        """
        if self._group is None:
            raise RuntimeError(
                "local updates: synchronize() after close(). Hint: call it before, or make another "
                "LocalUpdates."
            )
        self._updates.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state.

        To continue exactly, each rank saves it beside its own model's and optimizer's, and loads
        all three; with other ranks, or other arguments but `wire`, it cannot be loaded.
        """
        return _converted(self._updates.state_dict(), torch.from_numpy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's state; a collective.

        Load the model's and the optimizer's states after the object was made, which gives all ranks
        rank 0's parameters.

        Raises:
            CollectiveMismatchError: It is that of another rank; or the ranks' states are of
                different steps.
            ValueError: The states of all ranks are of other arguments.
        """
        self._updates.load_state_dict(_converted(state, lambda kept: kept.cpu().numpy()))

    def close(self) -> None:
        """Exchange nothing any more: the optimizer's steps are this rank's alone.

        It waits for the exchange that is on its way, at most as long as a collective.
        """
        self._hook.remove()
        _OPEN.discard(self)
        self._updates.close()
        self._leave_group()

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._updates.step()


class _ModelParameters:
    """A model's parameters, in fragments of about equal size."""

    def __init__(self, model: nn.Module, fragments: int) -> None:
        self._model, found = model, _trained(model)
        self._all = list(map(id, found))
        for parameter in found:
            if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    f"local updates: parameters of {parameter.dtype} would be rounded to float32. "
                    "Hint: float32, bfloat16 or float16."
                )
        if overlap(found):
            raise ValueError(
                "local updates: two parameters of the model share memory, which would be updated "
                "twice. Hint: tie them by making them one and the same Parameter."
            )
        self.described: Sequence[str] = _described(model)
        parts = divide([parameter.numel() for parameter in found], fragments)
        self._fragments = [[found[index] for index in part] for part in parts]
        counts = [sum(map(Tensor.numel, parameters)) for parameters in self._fragments]
        self.counts: Sequence[int] = counts

    def shares(self, other: _ModelParameters) -> bool:
        """Whether another one has some of these parameters."""
        return not set(self._all).isdisjoint(other._all)

    def read(self, fragment: int, values: Floats) -> None:
        """Write a fragment's values to `values`."""
        for parameter, part in self._parts(fragment, values):
            part.copy_(parameter.detach())

    def gap(self, fragment: int, anchor: Floats, gap: Floats) -> None:
        """Write `anchor - x` for each value x to `gap`.

        Raises:
            ValueError: Other parameters require gradients than at the beginning.
        """
        if list(map(id, _trained(self._model))) != self._all:
            raise ValueError(
                "local updates: parameters of the model were frozen, thawed or replaced, and would "
                "differ between the ranks. Hint: close() the LocalUpdates and make another one."
            )
        before = (part for _, part in self._parts(fragment, anchor))
        for (parameter, part), start in zip(self._parts(fragment, gap), before, strict=True):
            # A parameter of 16 bits holds the anchor rounded, which is no progress.
            start = _rounded(start, parameter.dtype)
            torch.sub(start, parameter.detach().to("cpu", torch.float32), out=part)

    def rounded(self, fragment: int, values: Floats) -> Floats | None:
        """`values` as the parameters hold them; None: exactly."""
        if all(parameter.dtype == torch.float32 for parameter in self._fragments[fragment]):
            return None
        parts = [_rounded(part, one.dtype).flatten() for one, part in self._parts(fragment, values)]
        return torch.cat(parts).numpy()

    @torch.no_grad()
    def write(self, fragment: int, values: Floats) -> None:
        """Make `values` those of a fragment."""
        for parameter, part in self._parts(fragment, values):
            parameter.copy_(part)

    @torch.no_grad()
    def add(self, fragment: int, changes: Floats) -> None:
        """Add `changes` to the values of a fragment."""
        for parameter, part in self._parts(fragment, changes):
            parameter.add_(part.to(parameter.device))

    def _parts(self, fragment: int, values: Floats) -> Any:
        parameters = self._fragments[fragment]
        parts = torch.from_numpy(values).split([parameter.numel() for parameter in parameters])
        return [
            (parameter, part.view(parameter.shape))
            for parameter, part in zip(parameters, parts, strict=True)
        ]


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).float()


def _described(model: nn.Module) -> list[str]:
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    parameters = [
        describe(name, one.shape, one.dtype, one.requires_grad)
        for name, one in plain.named_parameters()
    ]
    return parameters + [
        describe(name, one.shape, one.dtype) for name, one in plain.named_buffers()
    ]


def _trained(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    mine = set(map(id, model.parameters()))
    if not any(id(one) in mine for one in parameters_of(optimizer)):
        raise ValueError(
            "local updates: the optimizer has no parameter of the model. Hint: make it from "
            "model.parameters(), after the model is in its final place."
        )


def _check_others(parameters: _ModelParameters) -> None:
    if any(parameters.shares(other._parameters) for other in _OPEN):
        raise ValueError(
            "local updates: another LocalUpdates exchanges parameters of this model already. Hint: "
            "one serves all optimizers of a model: give it the one that steps last. Or close() the "
            "other one first."
        )


def _check_model(model: nn.Module, group: Any) -> None:
    if dist.get_rank(group) < 0:
        raise ValueError(
            "local updates: this rank is not in the group. Hint: make the LocalUpdates on the "
            "group's ranks only."
        )
    kinds = {type(one).__name__ for one in (*model.modules(), *model.parameters())}
    in_shards = any(map(is_sharded, model.parameters()))
    if in_shards or kinds & {"FullyShardedDataParallel", "DTensor"}:
        raise ValueError(
            "local updates: FSDP or ShardedOptimizer has divided this model's parameters among "
            "the ranks, so that none can train by itself. Hint: DistributedDataParallel inside "
            "nodes, or the plain model."
        )
    if isinstance(model, DistributedDataParallel):
        inner = set(dist.get_process_group_ranks(model.process_group))
        outer = set(dist.get_process_group_ranks(group or dist.group.WORLD))
        if inner >= outer and len(outer) > 1:
            raise ValueError(
                "local updates: DistributedDataParallel averages the gradients of all these ranks "
                "in each step already. Hint: pass the plain model, or average inside nodes only, "
                "with process_group=dist.new_subgroups(ranks_per_node)[0]."
            )


def _converted(state: Mapping[str, Any], convert: Any) -> dict[str, Any]:
    lists = {"anchors", "momenta"} & state.keys()
    arrays = {name: list(map(convert, state[name])) for name in lists}
    if state.get("gap") is not None:
        arrays["gap"] = convert(state["gap"])
    return {**state, **arrays}
