"""`ShardedOptimizer`: torch's optimizers on shards of weights that a node has once."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdp_plugins.core import SdpError
from sdp_plugins.core.errors import is_news
from sdp_plugins.torch import internals
from sdp_plugins.torch.sharding.buffers import SynchronizedBuffers, broadcast
from sdp_plugins.torch.sharding.checks import (
    check_optimizer,
    compare_ranks,
    core_group,
    find_mistake,
)
from sdp_plugins.torch.sharding.gradients import GradientBuckets
from sdp_plugins.torch.sharding.layout import Piece, lay_out
from sdp_plugins.torch.sharding.state import ShardedState
from sdp_plugins.torch.sharding.weights import move_to_node


class ShardedOptimizer(torch.optim.Optimizer):
    """Data parallelism in which a node has one copy of the weights, and ranks update shards of it.

        model = Net()                                           # not wrapped
        optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
        loss.backward(); optimizer.step(); optimizer.zero_grad()

    The backward pass puts gradients where peers can read them. ``step`` waits for all ranks'
    gradients, averages this rank's shards of them, updates these by torch's own optimizer, and
    returns when all ranks have: see docs/sharding.md. With N ranks on a node, each has 1/N of the
    state, and the node has the weights once instead of N times.

    A write into the weights is seen by all ranks of the node. If all of them write, as in
    ``weight.mul_(0.5)``, each writes into the same memory.

    Weights after k steps have the bits that DistributedDataParallel over smddp gives with the same
    optimizer, if the number of ranks is a power of two. All ranks begin with rank 0's weights and
    buffers. ``step`` and ``zero_grad`` drop the gradients. ``optimizer.state`` is empty:
    ``state_dict()`` has the state.

    Args:
        model: Its parameters move into shared memory; tensors that view them before do not follow.
            Parameters without ``requires_grad`` stay as they are.
        optimizer_class: One of `checks.BY_ELEMENT`: SGD, AdamW and others.
        params: Parameters or parameter groups, as for the plain optimizer; None: all of the
            model's that require a gradient.
        group: A process group of smddp; None: the default group.
        bucket_bytes: Size from which a bucket takes no other parameter.
        **defaults: The optimizer's settings.

    Raises:
        TypeError: The optimizer is none of them.
        ValueError: The group is not of smddp, or the ranks' models or settings differ.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 25 * 2**20,
        **defaults: Any,
    ) -> None:
        check_optimizer(optimizer_class)
        self._group, give_back = core_group(group)
        if params is None:
            params = [p for p in model.parameters() if p.requires_grad]
        super().__init__(
            params, optimizer_class([nn.Parameter(torch.zeros(1))], **defaults).defaults
        )
        parameters = [p for g in self.param_groups for p in g["params"]]
        groups = [i for i, g in enumerate(self.param_groups) for _ in g["params"]]
        known = {parameter: name for name, parameter in model.named_parameters()}
        names = [known.get(p, f"parameter {i}") for i, p in enumerate(parameters)]
        self._layout = lay_out(parameters, groups, self._group.world_size, bucket_bytes)
        compare_ranks(
            self._group,
            find_mistake(parameters, names),
            (optimizer_class, self._layout.buckets, [_but_params(g) for g in self.param_groups]),
            [(tuple(p.shape), p.stride(), p.dtype) for p in parameters],
        )
        sharded = set(parameters)
        for parameter in model.parameters():  # one by one: frozen ones may be most of the memory
            if parameter not in sharded:
                broadcast(self._group, [parameter])
        self._buckets = move_to_node(self._group, self._layout, parameters)
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        self._parameters, self._names = parameters, names
        myself = weakref.proxy(self)  # which the gradients do not keep alive
        self._gradients = gradients = GradientBuckets(
            self._group, self._layout, parameters, names, lambda *args: myself._unscale(*args)
        )
        buffers = SynchronizedBuffers(self._group, model, lambda: gradients.synchronizing)
        self._found_inf: Tensor | None = None
        self._make_inner(optimizer_class, defaults)
        self._updating = False
        self._end = weakref.finalize(self, _leave, gradients, buffers, give_back)
        self._end.atexit = False

    def _make_inner(
        self, optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
    ) -> None:
        settings: list[dict[str, Any]] = [{**each, "params": []} for each in self.param_groups]
        self._pieces: list[tuple[Piece, nn.Parameter]] = []
        for piece in self._layout.pieces(self._group.rank):
            tensor = nn.Parameter(self._buckets[piece.bucket][piece.start : piece.stop])
            settings[piece.slot.group]["params"].append(tensor)
            self._pieces.append((piece, tensor))
        self._inner = optimizer_class(settings, **defaults)
        self._averaged = False
        self._sharded = ShardedState(self._group, self._layout, self._parameters, self._pieces)

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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._raise_if_torn()
        for parameter, address, name in zip(
            self._parameters, self._addresses, self._names, strict=True
        ):
            if parameter.data_ptr() != address:
                raise RuntimeError(
                    f"step(): the weights of {name} were replaced by others, which no rank "
                    "updates. Hint: copy into them, as load_state_dict() does, instead of "
                    "assigning `.data`."
                )
        if self._averaged:
            self._group.barrier()  # since then, ranks may have read the weights
        self._average()
        self._use_settings()
        self._updating = True
        try:
            self._inner.step()
            if self._group.local_size < self._group.world_size:
                self._gather_weights()
            self._group.barrier()
        except BaseException as error:
            if is_news(error):
                self._group.abort(error)  # the other ranks wait for this one
            raise
        self._updating = False
        self._drop()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that no step has used; on all ranks alike."""
        self._drop()
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

    def close(self) -> None:
        """Leave the parameters to another optimizer, each rank with a copy of its own."""
        if self._end.alive:
            self._end()
            for parameter in self._parameters:
                parameter.data = parameter.data.clone()

    def _average(self) -> None:
        """Give this rank's pieces the gradients' averages, once in a step; a collective."""
        if self._averaged:
            return
        unused = self._gradients.finish()
        used = [(p, tensor) for p, tensor in self._pieces if p.slot.parameter not in unused]
        averages = self._gradients.average(piece for piece, _ in used)
        for (_, tensor), average in zip(used, averages, strict=True):
            tensor.grad = average
        self._averaged = True  # torch's optimizers skip those without gradient

    def _drop(self) -> None:
        for _, tensor in self._pieces:
            tensor.grad = None
        self._averaged = False
        self._found_inf = None
        self._gradients.drop()

    def _use_settings(self) -> None:
        """Give the inner optimizer what schedulers and users have set."""
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_but_params(outer))

    def _gather_weights(self) -> None:
        """Give this node the shards of others."""
        rank, world_size = self._group.rank, self._group.world_size
        for bucket, elements in zip(self._layout.buckets, self._buckets, strict=True):
            start, stop = bucket.shard(rank, world_size)
            whole = elements.view(torch.uint8)
            self._group.all_gather(whole, elements[start:stop].view(torch.uint8))

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
        norm_type = float(norm_type)
        if norm_type == 0:
            raise ValueError("clip_grad_norm_: norm_type 0 is no norm. Hint: 2.0.")
        gradients = self._averages()
        types = [torch.promote_types(g.dtype, torch.float32) for g in gradients]
        norms = [
            torch.linalg.vector_norm(g, norm_type, dtype=dtype)
            for g, dtype in zip(gradients, types, strict=True)
        ]
        mine = (
            torch.stack([n.double() for n in norms])
            if norms
            else torch.zeros(1, dtype=torch.float64)
        )
        if math.isinf(norm_type):
            total = mine.max().reshape(1)
            self._group.all_reduce(total, "max")
        else:
            total = mine.pow(norm_type).sum().reshape(1)
            self._group.all_reduce(total, "sum")
            total = total.pow(1.0 / norm_type)
        norm = total[0].float()
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The norm of order {norm_type} of the gradients is {norm.item()}, so they cannot "
                "be clipped. Hint: pass error_if_nonfinite=False to scale them all the same."
            )
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return norm

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Limit each element of the averaged gradients, as ``torch.nn.utils.clip_grad_value_``."""
        for gradient in self._averages():
            gradient.clamp_(-clip_value, clip_value)

    def _averages(self) -> list[Tensor]:
        """Of this rank's shards; a collective."""
        if not self._averaged:
            self._average()
            self._group.barrier()  # now no rank reads others' gradients any more
        return [tensor.grad for _, tensor in self._pieces if tensor.grad is not None]

    @torch.no_grad()
    def _unscale(self, found_inf: Tensor, inv_scale: Tensor) -> None:
        """GradScaler's operation, on the averages: all ranks find what one finds."""
        if self._found_inf is None:  # of all types at once: a rank may have gradients of some only
            gradients = self._averages()
            found = torch.zeros_like(found_inf)
            for each in {g.dtype for g in gradients}:
                of_type = [g for g in gradients if g.dtype is each]
                internals.unscale_gradients(of_type, found, inv_scale)
            self._group.all_reduce(found, "max")
            self._found_inf = found
        found_inf.add_(self._found_inf)

    # ---- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state of all parameters, on every rank; a collective."""
        self._raise_if_torn()
        return {**super().state_dict(), "state": self._sharded.gather(self._inner.state)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of a plain optimizer or of a ShardedOptimizer on any number of ranks."""
        state = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        self._use_settings()
        self._inner.state.clear()
        self._inner.state.update(self._sharded.scatter(state))

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
    gradients.leave_parameters()
    buffers.leave()
    give_back()


def _but_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
