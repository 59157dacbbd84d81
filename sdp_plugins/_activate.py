"""Activation without an import: entry point of torch.backends and torch.distributed.backends.

`import torch` calls `activate()`. It must be quick and must never raise, or torch could not be
imported; whatever it cannot do is left to an explicit `import sdp_plugins.torch`.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

BACKEND = "smddp"
STRATEGY_MODULES = (
    "lightning.pytorch.strategies",
    "pytorch_lightning.strategies",
    "lightning.fabric.strategies",
    "lightning_fabric.strategies",
)
ACCELERATE_MODULE = "accelerate.state"
ARGUMENTS_MODULE = "transformers.training_args"

log = logging.getLogger(__name__)


def activate() -> None:
    """Make "smddp" known to torch, and to Lightning and HuggingFace's libraries once imported."""
    try:
        from sdp_plugins.core.config import autoload, started_by_us

        if started_by_us():  # only these have a launcher that reads what they leave
            report_to_launcher()
        if autoload():
            register_backend()
            watch_for_lightning()
            watch_for_huggingface()
    except Exception:
        log.debug("smddp was not activated", exc_info=True)


def report_to_launcher() -> None:
    """Have the launcher find the exception that ends this rank, and its stacks if it hangs."""
    from sdp_plugins.core.error_file import write_uncaught
    from sdp_plugins.core.stack_dump import dump_on_signal

    dump_on_signal()
    write_uncaught()


def register_backend() -> None:
    """Register the backend with torch.distributed; a second time changes nothing."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


def create(*args: Any) -> Any:
    """Make a process group; what that takes is imported here, at the first use."""
    from sdp_plugins.torch.process_group import create as create_group

    return create_group(*args)


def watch_for_lightning() -> None:
    """Register the strategies once Lightning is imported, or now if it is already."""
    import wrapt

    for name in STRATEGY_MODULES:
        wrapt.register_post_import_hook(register_strategies, name)


def register_strategies(module: ModuleType) -> None:
    """Register with one of Lightning's strategy modules."""
    try:
        from sdp_plugins.lightning.registry import register

        register(module)
    except Exception:
        log.debug("strategy 'smddp' was not registered with %s", module.__name__, exc_info=True)


def watch_for_huggingface() -> None:
    """Patch accelerate and transformers once they are imported, or now if they are already."""
    import wrapt

    for name in (ACCELERATE_MODULE, ARGUMENTS_MODULE):
        wrapt.register_post_import_hook(patch_huggingface, name)


def patch_huggingface(module: ModuleType) -> None:
    """Have one of their modules know smddp; a second time changes nothing."""
    try:
        from sdp_plugins.core.config import patches_huggingface

        if not patches_huggingface():
            return
        if module.__name__ == ACCELERATE_MODULE:
            from sdp_plugins.huggingface.backend_choice import patch
        else:
            from sdp_plugins.huggingface.command_line import patch
        patch(module)
    except Exception:
        log.debug("%s was not patched", module.__name__, exc_info=True)
