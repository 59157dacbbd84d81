"""The "smddp" backend of torch.distributed.

Installing the package makes `init_process_group("smddp")` available. Where automatic loading of
backends is disabled, importing this module registers the backend, also with HuggingFace's
libraries. `import torch` imports this module, so it imports everything else lazily.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import wrapt

from sdp_plugins.torch.backend import register_backend

if TYPE_CHECKING:
    from sdp_plugins.core.local_updates.outer_step import OuterStep
    from sdp_plugins.torch.backend import create
    from sdp_plugins.torch.direct_gradients import write_into_buckets
    from sdp_plugins.torch.elastic.training import Elastic
    from sdp_plugins.torch.group_options import Options
    from sdp_plugins.torch.local_updates import LocalUpdates
    from sdp_plugins.torch.process_group import ProcessGroup
    from sdp_plugins.torch.sharding.optimizer import ShardedOptimizer
    from sdp_plugins.torch.share_tensor import share

__all__ = [
    "Elastic",
    "LocalUpdates",
    "Options",
    "OuterStep",
    "ProcessGroup",
    "ShardedOptimizer",
    "create",
    "share",
    "write_into_buckets",
]

_HOMES = {
    "Elastic": "elastic.training",
    "LocalUpdates": "local_updates",
    "Options": "group_options",
    "OuterStep": "local_updates",
    "ProcessGroup": "process_group",
    "ShardedOptimizer": "sharding.optimizer",
    "create": "backend",
    "share": "share_tensor",
    "write_into_buckets": "direct_gradients",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


register_backend()
for _module in ("accelerate.state", "transformers.training_args"):
    wrapt.register_post_import_hook("sdp_plugins.huggingface:patch", _module)
