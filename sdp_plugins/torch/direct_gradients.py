"""Linear layers and embeddings that write weight gradients into buckets themselves.

torch writes each gradient into new memory, from which it is copied into a bucket: the kernel clears
the memory first, and a weight that an embedding and a linear layer share takes three such tensors.
Where a batch has few rows and a weight many, this takes as long as half of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, TypeGuard
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.torch import internals

DIRECT_NBYTES = 4 * 2**20
"""Size of a weight from which the memory costs more than a function in Python."""
PLAIN = functional.linear, functional.embedding, nn.Linear.forward, nn.Embedding.forward
"""What is known of layers: a program that puts other functions there gets them."""


Find = Callable[[], Tensor | None]
"""Returns memory of a weight's shape, type and strides, which may become its gradient; or None."""


class Destination:
    """Where the gradient of one weight goes.

    Args:
        weight: Is dense.
        find: Its memory.
    """

    def __init__(self, weight: Tensor, find: Find) -> None:
        self._weight, self._find = weight, find
        self._accumulate = torch.autograd.graph.get_gradient_edge(weight).node
        self._written_in = -1  # the last backward pass of which a layer has written a part

    def on_whole(self, call: Callable[[], Any]) -> torch.utils.hooks.RemovableHandle:
        """Have a function called when a backward pass has made all of the gradient."""
        return self._accumulate.register_hook(lambda *_: call())

    def is_wanted(self) -> bool | None:
        """Whether the backward pass makes this gradient; None: autograd.grad() returns it."""
        try:
            return internals.will_run(self._accumulate)
        except RuntimeError:
            return None

    def open(self) -> tuple[Tensor, bool] | None:
        """Begin to write a layer's part of the gradient into ``weight.grad``.

        Returns:
            The memory, and whether other parts are in it; None: not now.
        """
        if torch.is_grad_enabled() or self._weight._backward_hooks or not self.is_wanted():
            return None  # somebody takes the gradient's own gradient, or looks at it
        if torch.is_anomaly_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        memory, before = self._find(), self._weight.grad
        this, last = internals.current_backward_pass(), self._written_in
        has_parts = before is memory and this == last
        if memory is None or (before is not None and not has_parts):
            return None  # autograd adds to what other passes have left
        self._weight.grad, self._written_in = memory, this
        return memory, has_parts


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, destination: Destination
    ) -> Tensor:
        ctx.save_for_backward(given, weight if ctx.needs_input_grad[0] else None)
        ctx.outputs, ctx.destination = len(weight), destination
        return functional.linear(given, weight, bias).data  # no view: may be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        given, weight = ctx.saved_tensors
        rows, columns = gradient.reshape(-1, ctx.outputs), given.reshape(-1, given.shape[-1])
        of_given, of_weight, of_bias = ctx.needs_input_grad[:3]
        is_wanted = of_weight and ctx.destination.is_wanted() is not False
        summed = rows if given.is_contiguous() else gradient  # in the order of torch's sum
        return (
            rows.mm(weight).view(given.shape) if of_given else None,
            _product(rows.t(), columns, ctx.destination) if is_wanted else None,
            summed.sum_to_size(ctx.outputs) if of_bias else None,
            None,
        )


def _product(rows: Tensor, columns: Tensor, destination: Destination) -> Tensor | None:
    if (opened := destination.open()) is None:
        return rows.mm(columns)
    memory, has_parts = opened
    if has_parts:
        memory.add_(rows.mm(columns))
    else:
        torch.mm(rows, columns, out=memory)
    return None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indices: Tensor, weight: Tensor, padding: int | None, destination: Destination
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.words, ctx.padding = len(weight), -1 if padding is None else padding
        ctx.destination = destination
        return functional.embedding(indices, weight, padding).data  # as above

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (indices,) = ctx.saved_tensors
        make = torch.ops.aten.embedding_dense_backward
        if ctx.destination.is_wanted() is False:
            return None, None, None, None
        few = indices.numel() < ctx.words  # to sort many would take longer than to copy
        if not few or (opened := ctx.destination.open()) is None:
            return None, make(gradient, indices, ctx.words, ctx.padding, False), None, None
        memory, has_parts = opened
        words, places = indices.long().unique(return_inverse=True)
        rows = make(gradient, places, len(words), -1, False)
        rows[words == ctx.padding] = 0
        if has_parts:
            memory.index_add_(0, words, rows)
        else:
            memory.zero_().index_copy_(0, words, rows)
        return None, None, None, None


class _Forward:
    """In the place of a layer's ``forward``; not in that of its copies."""

    def __init__(self, layer: Any, destination: Destination) -> None:
        self._layer, self._weight, self._destination = layer, layer.weight, destination

    def __call__(self, input: Tensor) -> Tensor:
        layer = self._layer
        if torch.compiler.is_compiling() or not self._can_write(input):
            return type(layer).forward(layer, input)  # type: ignore[no-any-return]
        if isinstance(layer, nn.Embedding):
            return _Embedding.apply(input, self._weight, layer.padding_idx, self._destination)
        return _Linear.apply(input, self._weight, layer.bias, self._destination)

    def _can_write(self, given: Tensor) -> bool:
        """Whether the layer does now what it does in most training, with its own weight."""
        return (
            torch.is_grad_enabled()
            and type(given) is Tensor
            and given.layout is torch.strided
            and not given.is_nested
            and _is_plain(self._layer)
            and (type(self._layer) is nn.Embedding or _is_by_rows(given, self._weight))
            and self._layer.weight is self._weight
            and self._weight.requires_grad
            and not torch.is_autocast_enabled("cpu")
            and not internals.is_transforming()
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._layer, "forward")  # of the copy, which has none of its own yet


class DirectGradients:
    """Has layers of a model write large weight gradients where they are to be, until `leave`.

    Args:
        model: Its layers of exactly the classes Linear and Embedding are meant.
        find: The memory, by weight.

    Attributes:
        destinations: By weight.
        hooks: Of these weights.
    """

    def __init__(self, model: nn.Module, find: Mapping[Tensor, Find]) -> None:
        self.destinations: dict[Tensor, Destination] = {}
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._forwards: list[tuple[nn.Module, _Forward]] = []
        for layer, weight in _layers_of(model):
            if weight not in find or weight.nbytes < DIRECT_NBYTES or not _is_real_array(weight):
                continue
            if weight not in self.destinations:
                self.destinations[weight] = Destination(weight, find[weight])
            destination = self.destinations[weight]
            layer.forward = forward = _Forward(layer, destination)
            self._forwards.append((layer, forward))

    def __repr__(self) -> str:
        mib = sum(weight.nbytes for weight in self.destinations) / 2**20
        return f"<{len(self._forwards)} layers write gradients of {mib:.1f} MiB>"

    def leave(self) -> None:
        """Give the layers their own ``forward`` back, and remove the hooks."""
        for hook in self.hooks:
            hook.remove()
        for layer, forward in self._forwards:
            if layer.__dict__.get("forward") is forward:
                del layer.forward


def _layers_of(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    for layer in model.modules():
        if not _is_plain(layer) or type(layer.weight) is not nn.Parameter:
            continue
        own = MethodType(type(layer).forward, layer)  # as in copies of such a layer
        if layer.__dict__.get("forward", own) == own or isinstance(layer.forward, _Forward):
            yield layer, layer.weight


def _is_real_array(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.is_contiguous() and weight.is_floating_point()


def _is_by_rows(given: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies as `_Linear` does; it transposes products with columns."""
    return weight.shape[1] > 1 and (given.dim() != 2 or given.stride(0) != 1)


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear | nn.Embedding]:
    """Whether all is known of what a layer does."""
    now = functional.linear, functional.embedding, nn.Linear.forward, nn.Embedding.forward
    if now != PLAIN:
        return False
    if type(layer) is nn.Embedding:
        is_usual = layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
        return is_usual and (layer.padding_idx is None or layer.padding_idx >= 0)
    return type(layer) is nn.Linear


class _Passes:
    """The backward passes whose gradients DistributedDataParallel reduces."""

    def __init__(self) -> None:
        self._is_due = False
        self._current = -1

    def after_forward(self, ddp: nn.Module, *_: Any) -> None:
        """The next backward pass is one, unless this was in no_sync()."""
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self._is_due = True

    def has_current(self) -> bool:
        """Whether the one that runs is, and not one of the module inside."""
        current = internals.current_backward_pass()
        if self._is_due:
            self._is_due, self._current = False, current
        return current == self._current


class _BucketView:
    """A weight's part of a bucket of DistributedDataParallel."""

    def __init__(self, passes: _Passes, weight: Tensor) -> None:
        self._passes = passes
        self._weight = ref(weight)  # the garbage collector does not see what hooks of graphs keep
        self._view: Tensor | None = None
        self._made: Tensor | None = None  # by autograd
        self._moves = 0

    def find(self) -> Tensor | None:
        """Where the reducer has put the last gradient."""
        is_reduced = self._passes.has_current()
        view, weight = self._view, self._weight()
        if view is None or weight is None or not is_reduced:
            return None
        if view.dtype is torch.float64 and view.data_ptr() % 16:
            return None  # the product would be rounded in another order there
        return view if view.dtype is weight.dtype and view.shape == weight.shape else None

    def before_reducer(self, weight: Tensor) -> None:
        """After autograd has made a gradient."""
        self._made = weight.grad

    def after_reducer(self) -> None:
        """After the reducer has put the gradient into a bucket, or has not, as in no_sync()."""
        self._passes.has_current()  # this pass counts, even if no layer has asked
        weight, made = self._weight(), self._made
        self._made = None
        gradient = None if weight is None else weight.grad
        if made is None or gradient is None or gradient is made:
            return
        self._moves += 1
        if self._moves > 1:  # after the first, the reducer makes other buckets
            self._view = gradient


def write_into_buckets(model: DistributedDataParallel) -> DirectGradients:
    """Have layers write large gradients into the buckets of DistributedDataParallel.

    ::

        model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
        sdp_plugins.torch.write_into_buckets(model)

    Without it, torch writes each gradient into new memory, and DistributedDataParallel copies it.
    Any backend reduces them. Layers are those of the classes Linear and Embedding with weights from
    4 MiB, on the CPU; see docs/torch.md.

    Args:
        model: Whose gradients are views of its buckets.

    Returns:
        What has changed the layers; it prints how many, and its ``leave()`` takes that back, as
        does the model's end.

    Raises:
        ValueError: They are no views.
        TypeError: It is no DistributedDataParallel.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            "write_into_buckets() needs a DistributedDataParallel, and got "
            f"{type(model).__name__}. Hint: wrap the module first, with "
            "gradient_as_bucket_view=True."
        )
    if not model.gradient_as_bucket_view:
        raise ValueError(
            "write_into_buckets(): the gradients of this DistributedDataParallel are copies. Hint: "
            "pass it gradient_as_bucket_view=True."
        )
    passes = _Passes()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    views: dict[Tensor, _BucketView] = {weight: _BucketView(passes, weight) for weight in trained}
    direct = DirectGradients(model, {weight: view.find for weight, view in views.items()})
    direct.hooks.append(model.register_forward_hook(passes.after_forward))
    for weight, destination in direct.destinations.items():
        view = views[weight]
        before = weight.register_post_accumulate_grad_hook(view.before_reducer)
        direct.hooks += before, destination.on_whole(view.after_reducer)
    finalize(model, direct.leave).atexit = False
    return direct
