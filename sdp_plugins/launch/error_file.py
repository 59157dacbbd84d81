"""What a rank has left in its error file; `core/error_file.py` writes it, in the rank."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VARIABLE = "SDP_ERROR_FILE"
LONGEST = 1 << 20
_LOSSES = ("peer_lost", "aborted")


@dataclass(frozen=True)
class RankError:
    """The exception that ended a rank.

    Attributes:
        kind: `exception`, or the kind of an `SdpError`.
        ranks: The ranks that it blames, as the job numbers them.
        origin_rank: The rank that met the cause first; None if that is not known.
        op: In which operation; empty outside of any.
        seq: The number of the operation.
        elapsed_s: For how long the rank was in it.
        traceback: Its lines.
    """

    kind: str = "exception"
    ranks: tuple[int, ...] = ()
    origin_rank: int | None = None
    op: str = ""
    seq: int = -1
    elapsed_s: float = 0.0
    traceback: list[str] = field(default_factory=list)

    @property
    def is_loss(self) -> bool:
        """Whether the rank failed because it lost another."""
        return self.kind in _LOSSES

    @property
    def blames(self) -> list[int]:
        """The ranks that may be the cause, the likeliest last."""
        return [*self.ranks, *([] if self.origin_rank is None else [self.origin_rank])]


def parsed(data: Mapping[str, Any] | None) -> RankError | None:
    """The fields as a rank has written them; None if it has written none, or something else."""
    if not data:
        return None
    try:
        origin = data.get("origin_rank")
        return RankError(
            str(data["kind"]),
            tuple(map(int, data["ranks"])),
            None if origin is None else int(origin),
            str(data["op"]),
            int(data["seq"]),
            float(data["elapsed_s"]),
            [str(line) for line in data["traceback"]],
        )
    except (KeyError, TypeError, ValueError):
        return None


class ErrorFile:
    """A file without a name: it is gone with the launcher, whatever ends that."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("sdp-error", os.MFD_CLOEXEC)

    @property
    def path(self) -> str:
        """Where the rank finds it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def read(self) -> dict[str, Any] | None:
        """What the rank has written; None if that is nothing, or no JSON object."""
        try:
            data = json.loads(os.pread(self._fd, LONGEST, 0) or "null")
        except (OSError, ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) else None

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)
