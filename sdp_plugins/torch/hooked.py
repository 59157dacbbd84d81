"""Registers torch's hooks on a process group; version 2.14 and later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sdp_plugins.torch.hooks import Hooks, are_asked_for
from sdp_plugins.torch.internals import TAKES_BACKENDS
from sdp_plugins.torch.process_group_lifecycle import ProcessGroupBase


class Hooked(ProcessGroupBase):
    """A process group whose calls torch's hooks may see."""

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Store the description, the last that torch says of a new group; attach its observers."""
        super().setGroupDesc(description)
        if TAKES_BACKENDS and self.hooks is None and are_asked_for():
            self._with_hooks().attach_what_is_asked_for(self.global_ranks or range(self.size()))

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call a hook before each collective."""
        self._with_hooks().through.register_pre_hook(hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Forget a hook."""
        self._with_hooks().through.unregister_pre_hook(hook_id)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call a hook after each collective has been issued."""
        self._with_hooks().through.register_post_hook(hook_id, hook)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Forget a hook."""
        self._with_hooks().through.unregister_post_hook(hook_id)

    def _with_hooks(self) -> Hooks:
        if not TAKES_BACKENDS:
            raise NotImplementedError("Hooks of process groups need PyTorch 2.14 or later.")
        if self.hooks is None:
            self.hooks = Hooks(self)
        found: Hooks = self.hooks
        return found

    def shutdown(self) -> None:
        """Leave the group; every later call raises."""
        self.hooks = None  # refers to this group through C++, where no garbage collector looks
        super().shutdown()
