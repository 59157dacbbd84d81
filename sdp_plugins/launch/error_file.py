"""Reads a rank's error file, which `core/error_file.py` writes in the rank."""

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
        ranks: The blamed ranks, by their numbers in the job.
        origin_rank: The rank that detected the failure first; None if unknown.
        op: The operation; empty outside of one.
        seq: The operation's sequence number.
        elapsed_s: Seconds that the rank spent in the operation.
        traceback: Lines of the traceback.
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
        """The ranks that may be the cause, the most likely one last."""
        return [*self.ranks, *([] if self.origin_rank is None else [self.origin_rank])]


def parsed(data: Mapping[str, Any] | None) -> RankError | None:
    """Parse the fields that a rank has written; None if there are none, or if they are invalid."""
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
    """A memfd, so that the file disappears with the launcher however that ends."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("sdp-error", os.MFD_CLOEXEC)

    @property
    def path(self) -> str:
        """Path by which the rank opens the file."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def read(self) -> dict[str, Any] | None:
        """The JSON object that the rank has written; None if there is none."""
        try:
            data = json.loads(os.pread(self._fd, LONGEST, 0) or "null")
        except (OSError, ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) else None

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
