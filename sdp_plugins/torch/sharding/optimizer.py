"""`ShardedOptimizer`: torch's optimizers on shards of weights that a node has once."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdp_plugins.core import SdpError
from sdp_plugins.core.errors import is_news
from sdp_plugins.torch.sharding.averages import Averages
from sdp_plugins.torch.sharding.buffers import SynchronizedBuffers, broadcast
from sdp_plugins.torch.sharding.checks import (
    check_optimizer,
    compare_ranks,
    core_groups,
    find_mistake,
    parameters_of,
)
from sdp_plugins.torch.sharding.gradients import GradientBuckets
from sdp_plugins.torch.sharding.layout import Piece, lay_out
from sdp_plugins.torch.sharding.masters import MasterWeights
from sdp_plugins.torch.sharding.state import ShardedState
from sdp_plugins.torch.sharding.weights import NodeWeights, like


class ShardedOptimizer(torch.optim.Optimizer):
    """Data parallelism in which a node has one copy of the weights, and ranks update shards of it.

        model = Net()                                           # not wrapped
        optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
        loss.backward(); optimizer.step(); optimizer.zero_grad()

    The backward pass puts gradients where peers can read them. ``step`` waits for all ranks'
    gradients, averages this rank's shards of them, updates these by torch's own optimizer, and
    returns when all ranks have: see docs/sharding.md. With N ranks on a node, each has 1/N of the
    state, and the node has the weights once instead of N times.

    What a program writes into the weights, on all ranks alike, other ranks do not see; in the next
    step each rank's shard of it counts.

    Weights after k steps have the bits that DistributedDataParallel over smddp gives with the same
    optimizer, if the number of ranks is a power of two. All ranks begin with rank 0's weights and
    buffers. ``step`` and ``zero_grad`` drop the gradients. ``optimizer.state`` is empty:
    ``state_dict()`` has the state.

    Args:
        model: Its parameters move into shared memory; tensors that view them before do not follow.
            Parameters without ``requires_grad`` stay as they are.
        optimizer: One of `checks.BY_ELEMENT` and `checks.BY_PARAMETER`: SGD, AdamW, Muon and
            others. Or an object of it, whose parameter groups, schedulers, state and step hooks go
            on to count; the hooks run after the update, and see no parameters.
        params: Parameters or parameter groups, as for the plain optimizer; None: all of the
            model's. Those that require no gradient now are left alone.
        group: A process group of smddp; None: the default group.
        bucket_bytes: Size from which a bucket takes no other parameter.
        by_parameter: Whether each parameter is updated as a whole, by one rank, also where the
            optimizer is not known to need it. Allows any optimizer whose update of a parameter
            depends on no other.
        master_weights: Whether the optimizer updates float32 copies of bfloat16 and float16
            weights, of which each rank has those of its shard, and the weights are these copies,
            rounded. The state, which has them as "master_param", is float32, too.
        **defaults: The optimizer's settings.

    Raises:
        TypeError: The optimizer is none that can be divided, or an object and settings are given.
        ValueError: The group is not of smddp, or the ranks' models or settings differ.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 25 * 2**20,
        by_parameter: bool = False,
        master_weights: bool = False,
        **defaults: Any,
    ) -> None:
        by_parameter = check_optimizer(optimizer, params, defaults, by_parameter)
        self._consolidated: tuple[dict[int, Any] | None, int | None]  # and the rank that has it
        self._given: torch.optim.Optimizer | None = None
        if isinstance(optimizer, type):
            plain = optimizer(model.parameters() if params is None else params, **defaults)
        else:
            plain = self._given = optimizer
        super().__init__(plain.param_groups, plain.defaults)
        plain.param_groups = self.param_groups  # one list, where its schedulers look
        self._program, self._group, give_back = core_groups(group)
        try:
            self._share(model, plain, bucket_bytes, by_parameter, master_weights)
        except BaseException:
            give_back()
            raise
        self._end = weakref.finalize(self, _leave, self._gradients, self._buffers, give_back)
        self._end.atexit = False

    def _share(
        self,
        model: nn.Module,
        plain: torch.optim.Optimizer,
        bucket_bytes: int,
        by_parameter: bool,
        master_weights: bool,
    ) -> None:
        """Move the weights into shared memory, and take the gradients; a collective."""
        parameters = parameters_of(self)
        groups = [i for i, g in enumerate(self.param_groups) for _ in g["params"]]
        known: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        names = [known.get(p, f"parameter {i}") for i, p in enumerate(parameters)]
        world_size = self._group.world_size
        self._layout = lay_out(parameters, groups, world_size, bucket_bytes, by_parameter)
        compare_ranks(
            self._group,
            find_mistake(parameters, names),
            (type(plain), master_weights, self._layout.buckets),
            [_but_params(group) for group in self.param_groups],
            [(tuple(p.shape), p.stride(), p.dtype) for p in parameters],
        )
        trained = {parameters[slot.parameter] for b in self._layout.buckets for slot in b.slots}
        for parameter in model.parameters():  # one by one: frozen ones may be most of the memory
            if parameter not in trained:
                broadcast(self._group, [parameter])
        self._weights = NodeWeights(self._group, self._layout, parameters)
        self._addresses = [p.data_ptr() if p in trained else None for p in parameters]
        self._parameters, self._names = parameters, names
        self._gradients = gradients = GradientBuckets(
            self._program, self._group, self._layout, parameters, names
        )
        self._buffers = SynchronizedBuffers(self._program, model, lambda: gradients.synchronizing)
        self._masters = MasterWeights(master_weights)
        self._make_inner(plain)
        self._updating = False

    def _make_inner(self, plain: torch.optim.Optimizer) -> None:
        """Make an optimizer of this rank's pieces."""
        self._inner = copy.copy(plain)  # what torch pickles
        for name, value in plain.__dict__.items():
            if name not in self._inner.__dict__ and name != "step":  # which schedulers wrap
                setattr(self._inner, name, value)
        self._inner.param_groups = [{**each, "params": []} for each in self.param_groups]
        self._pieces: list[tuple[Piece, nn.Parameter]] = []
        for piece in self._layout.pieces(self._group.rank):
            weights, seen = (
                each[piece.bucket][piece.start : piece.stop]
                for each in (self._weights.buckets, self._weights.views)
            )
            if self._layout.by_parameter:
                parameter = self._parameters[piece.slot.parameter]
                weights, seen = like(parameter, weights, 0), like(parameter, seen, 0)
            tensor = self._masters.add(weights, seen)
            self._inner.param_groups[piece.slot.group]["params"].append(tensor)
            self._pieces.append((piece, tensor))
        for index, placeholder in self._gradients.placeholders.items():
            placeholder.averaged_as = self._masters.dtype_of(self._parameters[index])
        self._averages = Averages(self._group, self._gradients, self._pieces)
        self._sharded = ShardedState(self._group, self._layout, self._parameters, self._pieces)
        self._take_state(plain.state_dict()["state"], loads=False)
        plain.state.clear()

    # ---- training ------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all weights; a collective.

        Args:
            closure: Computes the loss again and returns it, as for every optimizer.

        Raises:
            RuntimeError: A parameter's weights were replaced.
            SdpError: A rank was lost or gave up. If that was in its update, weights are partly of
                this step and partly of the one before, and later calls raise, too.
        """
        if not self._end.alive:
            raise RuntimeError("step(): this optimizer was closed. Hint: make another one.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._raise_if_torn()
        self._check_parameters()
        self._averages.compute(self._weights.changed())
        self._use_settings()
        self._updating = True
        try:
            self._weights.take()
            self._masters.follow()
            self._inner.step()
            self._masters.write()
            if self._group.local_size < self._group.world_size:
                self._gather_weights()
            self._group.barrier()
            self._weights.tell_autograd(self._gradients.unused)
        except BaseException as error:
            if is_news(error):
                self._group.abort(error)  # the other ranks wait for this one
            raise
        self._updating = False
        self._averages.drop()
        self._consolidated = None, None
        self._tell_given()
        return loss

    def _tell_given(self) -> None:
        """Have schedulers, hooks and counters in parameter groups know of a step."""
        if self._given is None:
            for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
                outer.update(_but_params(inner))
            return
        members = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = []  # some optimizers update parameters without gradient, too
        try:
            self._given.step()
        finally:
            for group, parameters in zip(self.param_groups, members, strict=True):
                group["params"] = parameters

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that no step has used; on all ranks alike."""
        self._averages.drop()
        super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have backward passes accumulate gradients on this rank, without communication.

        The first backward pass outside reduces the sums.
        """
        before, self._gradients.synchronizing = self._gradients.synchronizing, False
        try:
            yield
        finally:
            self._gradients.synchronizing = before

    def synchronize_buffers(self) -> None:
        """Give all ranks rank 0's buffers before they evaluate together; a collective."""
        self._buffers.synchronize()

    def close(self) -> None:
        """Leave the parameters to another optimizer, each rank with a copy of its own."""
        if self._end.alive:
            self._end()
            for parameter, address in zip(self._parameters, self._addresses, strict=True):
                if address is not None:
                    parameter.data = parameter.data.clone()

    def _check_parameters(self) -> None:
        for parameter, address, name in zip(
            self._parameters, self._addresses, self._names, strict=True
        ):
            if address is None and parameter.grad is not None:
                raise RuntimeError(
                    f"step(): {name} required no gradient when this optimizer was made, so no rank "
                    "updates it. Hint: freeze parameters afterwards, or give them lr=0."
                )
            if address not in (None, parameter.data_ptr()):
                raise RuntimeError(
                    f"step(): the weights of {name} were replaced by others, which no rank "
                    "updates. Hint: copy into them, as load_state_dict() does, instead of "
                    "assigning `.data`."
                )

    def _use_settings(self) -> None:
        """Give the inner optimizer what schedulers and users have set."""
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_but_params(outer))

    def _gather_weights(self) -> None:
        """Give this node the shards of others."""
        for bucket, elements in zip(self._layout.buckets, self._weights.buckets, strict=True):
            shards = [elements[i:j].view(torch.uint8) for i, j in pairwise(bucket.bounds)]
            self._group.all_gather_uneven(shards, shards[self._group.rank])

    def _raise_if_torn(self) -> None:
        if self._updating:
            self._group.raise_if_failed()
            raise SdpError(
                f"{self._group.error_prefix}ShardedOptimizer: an update of the weights was "
                "interrupted: they are partly of one step and partly of another. Hint: make a new "
                "group, model and optimizer, and load a checkpoint."
            )

    # ---- clipping ------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the averaged gradients of all parameters to a norm; a collective.

        As ``torch.nn.utils.clip_grad_norm_``, whose result it returns, up to rounding.
        """
        norm = self._averages.total_norm(float(norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The norm of order {norm_type} of the gradients is {norm.item()}, so they cannot "
                "be clipped. Hint: pass error_if_nonfinite=False to scale them all the same."
            )
        self._averages.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Limit each element of the averaged gradients, as ``torch.nn.utils.clip_grad_value_``."""
        self._averages.clamp(-clip_value, clip_value)

    # ---- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state of all parameters.

        A collective, and on every rank; but after `consolidate_state_dict`, until the next step,
        only on the rank that has the state.
        """
        state, rank = self._consolidated
        if state is None:
            state = self._gather_state(None)
        elif rank not in (None, self._group.rank):
            raise RuntimeError(
                f"{self._group.error_prefix}state_dict(): the state was consolidated on rank "
                f"{rank}. Hint: call it there, or consolidate_state_dict({self._group.rank})."
            )
        return {**super().state_dict(), "state": state}

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Have one rank gather the state, as with ``ZeroRedundancyOptimizer``; a collective.

        Args:
            to: Its rank in the group; others need no memory for it. None: all ranks.
        """
        self._consolidated = self._gather_state(to), to

    def _gather_state(self, to: int | None) -> dict[int, Any]:
        self._raise_if_torn()
        self._program.all_reduce(torch.zeros(1, dtype=torch.uint8))  # see GradientBuckets
        with torch.no_grad():
            self._masters.follow()
        state: dict[Any, Any] = {**self._inner.state}
        others = {key: state.pop(key) for key in list(state) if not isinstance(key, Tensor)}
        return {**self._sharded.gather(self._masters.add_to(state), to), **others}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of a plain optimizer or of a ShardedOptimizer on any number of ranks."""
        state, groups = state_dict["state"], self.param_groups
        super().load_state_dict({**state_dict, "state": {}})
        groups[:] = self.param_groups
        self.param_groups = groups
        self._use_settings()
        self._take_state(state)

    def _take_state(self, state: Mapping[Any, Any], loads: bool = True) -> None:
        mine = self._sharded.scatter(state, loads)
        self._masters.take_from(mine)
        others = {key: value for key, value in state.items() if not isinstance(key, int)}
        self._inner.state = defaultdict(dict, {**mine, **copy.deepcopy(others)})
        self._consolidated = None, None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is made: the weights lie in shared memory afterwards."""
        if hasattr(self, "_layout"):
            raise RuntimeError(
                "ShardedOptimizer: parameter groups cannot be added. Hint: give all of them to "
                "the constructor, with lr=0 for those that train later."
            )
        super().add_param_group(param_group)


def _leave(
    gradients: GradientBuckets, buffers: SynchronizedBuffers, give_back: Callable[[], object]
) -> None:
    buffers.leave()
    try:
        gradients.leave_parameters()
    finally:
        give_back()


def _but_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
