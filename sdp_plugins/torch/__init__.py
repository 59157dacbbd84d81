"""The "smddp" backend of torch.distributed.

Installing the package is enough for `init_process_group("smddp")`; importing this module registers
the backend, and has HuggingFace's libraries know it, where that is switched off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdp_plugins._activate import register_backend, watch_for_huggingface
from sdp_plugins.torch.process_group import ProcessGroup, create
from sdp_plugins.torch.share_tensor import share
from sdp_plugins.torch.torch_compile import skip_when_tracing

if TYPE_CHECKING:
    from sdp_plugins.torch.capability_table import Capability

__all__ = ["ProcessGroup", "capabilities", "create", "share"]


def capabilities() -> tuple[Capability, ...]:
    """Every operation with every dtype and reduction that runs, and by which path."""
    from sdp_plugins.torch.capability_table import capabilities  # a program seldom asks

    return capabilities()


register_backend()
watch_for_huggingface()
skip_when_tracing()
