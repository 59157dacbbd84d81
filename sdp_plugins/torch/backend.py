"""Registers the backend with torch.distributed.

`import torch` imports this file, so creating a process group imports the modules it needs.
"""

from __future__ import annotations

import sys
from typing import Any

from sdp_plugins.torch.backend_name import BACKEND


def register_backend() -> None:
    """Register the backend; further calls change nothing."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


def _serve_accelerator() -> None:
    """Tell torch that the backend serves this machine's accelerator.

    Not in `register_backend`: that would look for one in every program, and make smddp the default
    of devices that have no backend.
    """
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    served = dist.Backend.backend_capability[BACKEND]
    if accelerator is not None and accelerator.type not in served:
        served.append(accelerator.type)


def create(options: Any, pg_options: Any = None) -> Any:
    """Create the group of one init_process_group() or new_group(), on each of its ranks.

    Args:
        options: c10d's DistributedBackendOptions.
        pg_options: ``Options``; a ``Meeting`` of the ranks, if they have met already; or, ignored,
            those of the group's other backend.

    Returns:
        A ``ProcessGroup``; a ``DeviceBackend`` if the group has another backend, too.

    Raises:
        TypeError: The `pg_options` are not of this backend.
        ValueError: An environment variable has an invalid value.
        RendezvousError: The ranks did not find each other.
    """
    from sdp_plugins.core.regroup import Meeting
    from sdp_plugins.torch.group_making import make_group, make_unready_group
    from sdp_plugins.torch.group_options import Options, default_options
    from sdp_plugins.torch.internals import TAKES_BACKENDS

    mixed = TAKES_BACKENDS and _has_others(sys._getframe(1).f_locals.get("backend_config"))
    if mixed and not isinstance(pg_options, Options):
        pg_options = None
    if not (pg_options is None or isinstance(pg_options, (Meeting, Options))):
        raise TypeError(
            f"{BACKEND} takes no pg_options of type {type(pg_options).__name__}. Hint: pass "
            "sdp_plugins.torch.Options(...), or none."
        )
    meeting = pg_options if isinstance(pg_options, Meeting) else None
    given = pg_options if isinstance(pg_options, Options) else default_options.get()
    chosen = given or Options()
    _serve_accelerator()
    if getattr(options, "enable_reconfigure", False) and not mixed:  # which torch cannot change
        group = make_unready_group(options, chosen)
    else:
        group = make_group(options, meeting, chosen)
    if not mixed:
        return group
    from sdp_plugins.torch.device_backend import DeviceBackend

    return DeviceBackend(group)


def _has_others(backend_config: Any) -> bool:
    """Return whether torch's caller makes a group of several backends, which no option tells."""
    return len(set(getattr(backend_config, "device_backend_map", {}).values())) > 1
