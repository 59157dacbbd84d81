"""smddp's part of a group of torch's."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from sdp_plugins.core import Group
from sdp_plugins.torch.group_properties import GroupProperties
from sdp_plugins.torch.internals import c10d


def smddp_group(group: Any = None) -> Any:
    """Return the process group of smddp behind a group, or None.

    It is the group itself, or that of one of the backends of a group such as
    `cpu:smddp,cuda:nccl`.

    Args:
        group: A process group of torch's; None means the default group.
    """
    chosen = dist.group.WORLD if group is None else group
    if isinstance(chosen, GroupProperties):
        return chosen
    if not isinstance(chosen, dist.ProcessGroup):
        return None
    backends = [chosen._get_backend(device) for device in chosen._device_types]
    behind = (getattr(_unwrapped(backend), "group", None) for backend in backends)
    return next((each for each in behind if isinstance(each, GroupProperties)), None)


def core_group(group: Any = None) -> Group | None:
    """Return the core's group behind a group of torch's; None if it is not of smddp.

    Args:
        group: As for `smddp_group`.
    """
    found = smddp_group(group)
    return found and found._group


def _unwrapped(backend: Any) -> Any:
    """Return what TORCH_DISTRIBUTED_DEBUG=DETAIL has wrapped."""
    return backend.wrapped_pg if isinstance(backend, c10d._ProcessGroupWrapper) else backend
