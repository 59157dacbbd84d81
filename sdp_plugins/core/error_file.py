"""The error file of a rank: the exception that ended it, as fields, for its launcher.

`sdp run` gives each rank a file of its own by ``SDP_ERROR_FILE``, as torchrun does by
``TORCHELASTIC_ERROR_FILE``. Which rank failed first is then read from fields, not from stderr.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from .config import take_error_file
from .errors import NO_SEQ, SdpError, latest_error, quoted
from .launcher_file import LauncherFile

_MOST_LINES = 400
_MOST_CHARS = 2000  # of a line
_LONGEST = 1 << 24  # of the file: a character takes up to 12 bytes in JSON
_LOSSES = ("peer_lost", "aborted")


def write_uncaught() -> None:
    """Write the exception that ends this process to its error file, if it has one.

    Without an uncaught exception it is the latest `SdpError`: a script may catch its exception,
    print it, and exit with a code. The first call installs the hook and removes the variable from
    the environment, because the processes that a rank starts are not ranks. Later calls do nothing.
    """
    path = take_error_file()
    if not path:
        return
    pid, previous = os.getpid(), sys.excepthook

    def write(error: BaseException) -> None:
        atexit.unregister(write_latest)
        if os.getpid() == pid:  # not a forked child
            with suppress(Exception):  # must not hide the exception
                _write(path, error)

    def write_latest() -> None:
        if error := latest_error():
            write(error)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        write(error)
        previous(kind, error, trace)

    atexit.register(write_latest)
    sys.excepthook = hook


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
        traceback: Lines of the traceback; none if the rank has caught the exception.
    """

    kind: str = "exception"
    ranks: tuple[int, ...] = ()
    origin_rank: int | None = None
    op: str = ""
    seq: int = NO_SEQ
    elapsed_s: float = 0.0
    traceback: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        """Describe an exception, by the fields of an `SdpError` if one is among its causes."""
        shown = traceback.format_exception(error) if error.__traceback__ else ()
        text = "".join(shown).splitlines()[-_MOST_LINES:]
        lines = [line if len(line) <= _MOST_CHARS else f"{line[:_MOST_CHARS]} ..." for line in text]
        found = sdp_error_in(error)
        if found is None:
            return cls(traceback=lines)
        ranks, origin = found.global_ranks, found.global_origin_rank
        return cls(found.kind, ranks, origin, found.op, found.seq, found.elapsed_s, lines)

    @classmethod
    def parse(cls, data: Mapping[str, Any] | None) -> RankError | None:
        """Parse the fields that a rank has written; None if there are none, or invalid ones."""
        if not data:
            return None
        try:
            origin = data.get("origin_rank")
            return cls(
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

    @property
    def is_loss(self) -> bool:
        """Whether the rank failed because it lost another."""
        return self.kind in _LOSSES

    @property
    def blames(self) -> list[int]:
        """The ranks that may be the cause, the most likely one last."""
        return [*self.ranks, *([] if self.origin_rank is None else [self.origin_rank])]


class ErrorFile(LauncherFile):
    """A rank's error file."""

    def __init__(self) -> None:
        super().__init__("sdp-error")

    def read(self) -> dict[str, Any] | None:
        """The JSON object that the rank has written; None if there is none."""
        try:
            data = json.loads(os.pread(self._fd, _LONGEST, 0) or "null")
        except (OSError, ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) else None


def _write(path: str, error: BaseException) -> None:
    text = json.dumps(asdict(RankError.of(error)))
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def sdp_error_in(error: BaseException) -> SdpError | None:
    """The last `SdpError` among an exception's causes, or else the last that one of them quotes."""
    causes = [*_chain(error)]
    known = (one for one in causes if isinstance(one, SdpError))
    return next(known, None) or next(filter(None, (quoted(str(one)) for one in causes)), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exceptions that Python shows in its traceback, the last first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
