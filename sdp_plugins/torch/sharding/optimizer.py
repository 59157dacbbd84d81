"""`ShardedOptimizer`: torch's optimizers on shards of weights that a node has once."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdp_plugins.core import SdpError
from sdp_plugins.core.errors import is_news
from sdp_plugins.torch.sharding.agreement import naming
from sdp_plugins.torch.sharding.averages import Averages
from sdp_plugins.torch.sharding.buffers import SynchronizedBuffers, broadcast
from sdp_plugins.torch.sharding.checks import (
    check_model,
    check_optimizer,
    check_same_groups,
    compare_ranks,
    core_groups,
    find_mistake,
    form_of,
    parameters_of,
    refuse_ddp,
)
from sdp_plugins.torch.sharding.gradients import GradientBuckets, is_sharded
from sdp_plugins.torch.sharding.layout import lay_out
from sdp_plugins.torch.sharding.piece_optimizer import PieceOptimizer, settings_of
from sdp_plugins.torch.sharding.weights import NodeWeights


class ShardedOptimizer(torch.optim.Optimizer):
    """Data parallelism in which a node has one copy of the weights, and ranks update shards of it.

    ::

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
        check_model(model)
        by_parameter = check_optimizer(optimizer, params, defaults, by_parameter)
        self._given: torch.optim.Optimizer | None = None
        if isinstance(optimizer, type):
            plain = optimizer(model.parameters() if params is None else params, **defaults)
        else:
            plain = self._given = optimizer
        super().__init__(plain.param_groups, plain.defaults)
        plain.param_groups = self.param_groups  # one list, where its schedulers look
        with naming("the constructor"), ExitStack() as made:
            self._program, self._group, give_back = core_groups(group)
            made.callback(give_back)
            self._share(made, model, plain, bucket_bytes, by_parameter, master_weights)
            self._end = weakref.finalize(self, made.pop_all().close)
        self._end.atexit = False

    def _share(
        self,
        made: ExitStack,
        model: nn.Module,
        plain: torch.optim.Optimizer,
        bucket_bytes: int,
        by_parameter: bool,
        master_weights: bool,
    ) -> None:
        """Move the weights into shared memory, and take the gradients; a collective.

        What undoes it is put on `made`.
        """
        parameters = parameters_of(self)
        groups = [i for i, g in enumerate(self.param_groups) for _ in g["params"]]
        known: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        names = [known.get(p, f"parameter {i}") for i, p in enumerate(parameters)]
        world_size = self._group.world_size
        self._layout = lay_out(parameters, groups, world_size, bucket_bytes, by_parameter)
        compare_ranks(
            self._program,
            find_mistake(parameters, names),
            {
                "optimizer": type(plain).__name__,
                "options": (bucket_bytes, by_parameter, master_weights),
                **settings_of(self.param_groups),
                **{name: form_of(p) for name, p in zip(names, parameters, strict=True)},
            },
        )
        trained = {parameters[slot.parameter] for b in self._layout.buckets for slot in b.slots}
        for parameter in model.parameters():  # one by one: frozen ones may be most of the memory
            if parameter not in trained and not is_sharded(parameter):
                broadcast(self._group, [parameter])
        self._weights = NodeWeights(self._group, self._layout, parameters)
        self._addresses = [p.data_ptr() if p in trained else None for p in parameters]
        self._parameters, self._names = parameters, names
        try:
            self._take_over(made, model, plain, master_weights)
        except BaseException:
            self._weights.leave_tensors()
            raise

    def _take_over(
        self, made: ExitStack, model: nn.Module, plain: torch.optim.Optimizer, has_masters: bool
    ) -> None:
        """Take the gradients, the buffers and the plain optimizer's state; a collective."""
        shared = self._group, self._layout, self._parameters
        self._gradients = gradients = GradientBuckets(self._program, *shared, self._names)
        made.callback(gradients.leave_parameters)
        made.callback(gradients.write_in_layers(model).leave)
        refuse = partial(refuse_ddp, self._program.error_prefix)
        made.callback(model.register_forward_pre_hook(refuse).remove)
        self._buffers = SynchronizedBuffers(self._program, model, lambda: gradients.synchronizing)
        made.callback(self._buffers.leave)
        self._inner = PieceOptimizer(plain, *shared, self._weights, has_masters)
        for index, placeholder in gradients.placeholders.items():
            placeholder.averaged_as = self._inner.dtype_of(self._parameters[index])
        self._averages = Averages(self._group, gradients, self._inner.pieces)
        self._consolidated: tuple[dict[int, Any] | None, int | None]  # and the rank that has it
        self._consolidated = None, None
        self._updating = False
        self._loads = 0
        self._loading: Mapping[Any, Any] | None = None

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
        self._raise_if_closed("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._raise_if_torn()
        self._check_parameters()
        settings = {"states loaded": self._loads, **settings_of(self.param_groups)}
        self._averages.compute(self._weights.changed(), settings)
        self._inner.use_settings(self.param_groups)
        self._updating = True
        try:
            self._weights.take()
            self._inner.step()
            with naming("step()"):
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
            self._inner.give_settings(self.param_groups)
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
        if self._end.alive:
            self._averages.drop()
        super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have backward passes accumulate gradients on this rank, without communication.

        The first backward pass outside reduces the sums.
        """
        self._raise_if_closed("no_sync")
        gradients = self._gradients
        before, gradients.synchronizing = gradients.synchronizing, False
        try:
            yield
        finally:
            gradients.synchronizing = before

    def synchronize_buffers(self) -> None:
        """Give all ranks rank 0's buffers before they evaluate together; a collective."""
        self._raise_if_closed("synchronize_buffers")
        with naming("synchronize_buffers()"):
            self._buffers.synchronize()

    def close(self) -> None:
        """Leave the parameters to another optimizer, each rank with a copy of its own.

        ``state_dict`` goes on to have the state, which alone stays in memory.
        """
        if self._end.alive:
            self._end()
            self._weights.leave_tensors()
            self._group = self._program
            self._inner.leave_weights(self._group)
            del self._weights, self._gradients, self._averages, self._buffers

    def _raise_if_closed(self, method: str) -> None:
        if not self._end.alive:
            raise RuntimeError(
                f"{self._program.error_prefix}{method}(): this optimizer was closed. Hint: make "
                "another one."
            )

    def _check_parameters(self) -> None:
        for parameter, address, name in zip(
            self._parameters, self._addresses, self._names, strict=True
        ):
            if address is None and parameter.grad is not None:
                raise RuntimeError(
                    f"{self._program.error_prefix}step(): {name} required no gradient when this "
                    "optimizer was made, so no rank updates it. Hint: make the optimizer "
                    "while all parameters that train at any time require gradients."
                )
            if address not in (None, parameter.data_ptr()):
                raise RuntimeError(
                    f"{self._program.error_prefix}step(): the weights of {name} were replaced by "
                    "others, which no rank updates. Hint: copy into them, as load_state_dict() "
                    "does, instead of assigning `.data`."
                )

    def _gather_weights(self) -> None:
        """Give this node the shards of others."""
        for bucket, elements in zip(self._layout.buckets, self._weights.buckets, strict=True):
            shards = [elements[i:j].view(torch.uint8) for i, j in pairwise(bucket.bounds)]
            self._group.all_gather_uneven(shards, shards[self._group.rank])

    def _raise_if_torn(self) -> None:
        if self._updating:
            self._group.raise_if_failed()
            raise SdpError(
                f"{self._program.error_prefix}ShardedOptimizer: an update of the weights was "
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
        self._raise_if_closed("clip_grad_norm_")
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
        self._raise_if_closed("clip_grad_value_")
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
                f"{self._program.error_prefix}state_dict(): the state was consolidated on rank "
                f"{self._program.nodes.global_rank(rank)}. Hint: call it there, or "
                f"consolidate_state_dict({self._group.rank})."
            )
        self.state = defaultdict(dict, state)  # type: ignore[arg-type]
        try:
            return super().state_dict()
        finally:
            self.state = defaultdict(dict)

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Have one rank gather the state, as with ``ZeroRedundancyOptimizer``; a collective.

        Args:
            to: Its rank in the group; others need no memory for it. None: all ranks.
        """
        if to is not None and not 0 <= to < self._group.world_size:
            raise ValueError(
                f"consolidate_state_dict(): the group of {self._group.world_size} ranks has no "
                f"rank {to}."
            )
        self._consolidated = self._gather_state(to), to

    def _gather_state(self, to: int | None) -> dict[int, Any]:
        self._raise_if_torn()
        with naming("state_dict() or consolidate_state_dict()"):
            self._program.all_reduce(torch.zeros(1, dtype=torch.uint8))  # see GradientBuckets
            return self._inner.gather_state(to)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of a plain optimizer or of a ShardedOptimizer on any number of ranks."""
        self._raise_if_closed("load_state_dict")

        def hold(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            check_same_groups(loaded["param_groups"], self.param_groups)
            self._inner.check_settings(loaded["param_groups"])
            self._loading = loaded["state"]
            return {**loaded, "state": {}}

        hook = self.register_load_state_dict_pre_hook(hold)  # after the program's hooks
        try:
            super().load_state_dict(state_dict)  # type: ignore[arg-type]
        finally:
            hook.remove()
            self._loading = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by torch, between the hooks of ``load_state_dict``."""
        groups = self.param_groups
        groups[:] = state["param_groups"]
        super().__setstate__({**state, "param_groups": groups})
        assert self._loading is not None
        self._inner.use_settings(groups)
        self._inner.take_state(self._loading)
        self._inner.give_settings(groups)  # which a checkpoint of an older version of torch lacks
        self._loads += 1
        self._consolidated = None, None

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ShardedOptimizer cannot be copied or pickled. Hint: state_dict() has its state."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is made: the weights lie in shared memory afterwards."""
        if hasattr(self, "_layout"):
            raise RuntimeError(
                "ShardedOptimizer: parameter groups cannot be added. Hint: give all of them to "
                "the constructor, with lr=0 for those that train later."
            )
        super().add_param_group(param_group)
