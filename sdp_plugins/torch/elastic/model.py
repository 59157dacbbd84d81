"""The model of an elastic training, whose reducer is another one after each change of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class ElasticModel(nn.Module):
    """Calls a module in ``DistributedDataParallel``, of the ranks that are there.

    Args:
        module: The user's; not copied.
        options: Those of ``DistributedDataParallel``.

    Attributes:
        module: The user's.
        was_called: Whether the module has been called in this step.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self._options = {"init_sync": False, **options}
        self._current: list[DistributedDataParallel] = []  # in a list: its module is here already
        self.was_called = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        self.was_called = True
        return self._current[0](*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients, and do not average."""
        return self._current[0].no_sync()

    @contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        """Multiply this rank's gradients, before the reducer averages those of all ranks.

        So a backward pass ends with the mean over all samples where ranks have different numbers,
        and gradient clipping or an optimizer's closure sees that.
        """
        hooks = [
            parameter.register_hook(lambda gradient: gradient * weight)
            for parameter in (self.module.parameters() if weight != 1.0 else ())
            if parameter.requires_grad
        ]
        self.was_called = False
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def wrap(self) -> None:
        """Make the reducer of torch's present default group."""
        self._current = [DistributedDataParallel(self.module, **self._options)]

    def unwrap(self) -> None:
        """End the reducer."""
        for wrapper in self._current:
            end_reducer(wrapper)
        self._current = []


def end_reducer(wrapper: DistributedDataParallel) -> None:
    """End a reducer, whose hooks would work beside those of the next."""
    del wrapper.reducer, wrapper.logger
