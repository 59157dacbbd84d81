"""The "smddp" backend of torch.distributed.

Installing the package is enough for `init_process_group("smddp")`; importing this module registers
the backend where that is switched off.
"""

from __future__ import annotations

from sdp_plugins._activate import register_backend
from sdp_plugins.torch.compile import skip_when_tracing
from sdp_plugins.torch.process_group import ProcessGroup, create
from sdp_plugins.torch.sharing import share

__all__ = ["ProcessGroup", "create", "share"]

register_backend()
skip_when_tracing()
