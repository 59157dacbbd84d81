"""Activation without an import: entry point of torch.backends and torch.distributed.backends.

`import torch` calls `activate()`. It must be quick and must never raise, or torch could not be
imported; whatever it cannot do is left to an explicit `import sdp_plugins.torch`.
"""

from __future__ import annotations

import logging

STRATEGY_MODULES = (
    "lightning.pytorch.strategies",
    "pytorch_lightning.strategies",
    "lightning.fabric.strategies",
    "lightning_fabric.strategies",
)

log = logging.getLogger(__name__)


def activate() -> None:
    """Make "smddp" known to torch, and to Lightning and HuggingFace's libraries once imported."""
    try:
        from sdp_plugins.core.config import autoload, started_by_us

        if started_by_us():  # only these have a launcher that reads what they leave
            report_to_launcher()
        if autoload():
            import sdp_plugins.torch  # noqa: F401 - registers the backend

            watch_for_lightning()
    except Exception:
        log.debug("smddp was not activated", exc_info=True)


def report_to_launcher() -> None:
    """Have the launcher find the exception that ends this rank, and its stacks if it hangs."""
    from sdp_plugins.core.error_file import write_uncaught
    from sdp_plugins.core.stack_dump import dump_on_signal

    dump_on_signal()
    write_uncaught()


def watch_for_lightning() -> None:
    """Register the strategies once Lightning is imported, or now if it is already."""
    import wrapt

    for name in STRATEGY_MODULES:
        wrapt.register_post_import_hook("sdp_plugins.lightning.registry:register", name)
