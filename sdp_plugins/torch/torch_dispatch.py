"""Calls through c10d's operators, for tensors and modes with a dispatch of their own.

A Tensor subclass with a `__torch_dispatch__` holds its data in other tensors, and a
TorchDispatchMode (CommDebugMode, FakeTensorMode) sees every operator of its block. torch's own
backends are called through operators and so reach both; a process group in Python is called
directly. These calls are therefore repeated on a plain process group, whose methods only call the
operators. The operators that arrive below all subclasses and modes run on this group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sdp_plugins.torch.internals import FakeTensor, count_modes, python_dispatch

NO_MEMORY = "A FakeTensor has no memory. Hint: pass a tensor that holds data."
Method = TypeVar("Method", bound=Callable[..., Any])


class OnDeviceError(ValueError):
    """A tensor is on an accelerator."""


class OwnDispatchError(TypeError):
    """A tensor's class has a dispatch of its own, so its elements may lie in other tensors."""


def has_own_dispatch(kind: type) -> bool:
    """Return whether a tensor class has a dispatch of its own; fake tensors do not count."""
    own = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    return own and not issubclass(kind, FakeTensor)


def dispatched(method: Method) -> Method:
    """Let Tensor subclasses and dispatch modes see a method's operators first.

    The method raises OwnDispatchError before it has started any operation, and OnDeviceError for
    tensors on an accelerator: ``call_on_device`` of the group then runs it on CPU copies.
    """

    @wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.hooks is not None and not group.hooks.passed:
            return group.hooks.call(method.__name__, *args, **kwargs)
        if not count_modes():
            try:
                return directly(method, group, *args, **kwargs)
            except OwnDispatchError:
                pass
        return through_operators(method, group, *args, **kwargs)

    return call  # type: ignore[return-value]


def directly(method: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method that no subclass or mode has to see."""
    try:
        return method(group, *args, **kwargs)
    except OnDeviceError:
        pass
    return group.call_on_device(method, args, kwargs)


def through_operators(method: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a call through its operators; `method` runs those that arrive below all modes.

    If a subclass turns one call into several, this function waits for all of them except the one
    whose work it returns.
    """
    plain = dist.ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]
    plain._set_group_name(group.getGroupName())
    below = _Below(method, group, args, kwargs)
    with _beneath(below):
        work: Any = getattr(plain, method.__name__)(*args, **kwargs)
    for other in below.works:
        if other is not work:
            other.wait()
    return work


class _Below(python_dispatch.TorchDispatchMode):
    """Runs the operators of one call on the group.

    Attributes:
        works: The works that the group has returned.
    """

    def __init__(
        self, method: Callable[..., Any], group: Any, args: Any, kwargs: dict[str, Any]
    ) -> None:
        super().__init__()
        self._method, self._group = method, group
        self._args, self._kwargs = args, kwargs
        self.works: list[Any] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(has_own_dispatch(kind) for kind in types):
            return NotImplemented
        if operator.namespace != "c10d":
            return operator(*args, **(kwargs or {}))
        if types:
            raise ValueError(NO_MEMORY)
        # Tensors come first in operators as in methods; a barrier's tensor, however, is torch's
        # own.
        count = next(i for i, value in enumerate(args) if isinstance(value, torch.ScriptObject))
        given = 0 if self._method.__name__ == "barrier" else count
        rest = self._args[given:]
        work = directly(self._method, self._group, *args[:given], *rest, **self._kwargs)
        self.works.append(work)  # otherwise its Python half would be freed
        outputs = len(operator._schema.returns) - 1
        return (args[0], work.boxed()) if outputs else work.boxed()


@contextmanager
def _beneath(mode: python_dispatch.TorchDispatchMode) -> Iterator[None]:
    """Make a mode the last one to see operators, after all active modes."""
    with python_dispatch._disable_current_modes() as others:
        for each in (mode, *others):
            python_dispatch._push_mode(each)
        try:
            yield
        finally:
            for _ in (mode, *others):
                python_dispatch._pop_mode()
