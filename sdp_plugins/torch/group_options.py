"""What a program may choose for one process group."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The ``pg_options`` of ``init_process_group("smddp", ...)`` and of ``new_group``.

    Attributes:
        wire_dtype: How float32 values travel between nodes, as for ``Group.from_env``; None:
            ``SDP_WIRE_DTYPE``.
    """

    wire_dtype: str | None = None


default_options: ContextVar[Options | None] = ContextVar("default_options", default=None)
"""Options of groups that libraries make without any; None: there are none."""
