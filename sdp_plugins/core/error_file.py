"""The error file of a rank: the exception that ended it, as fields, for its launcher.

`sdp run` gives each rank a file of its own by ``SDP_ERROR_FILE``, as torchrun does by
``TORCHELASTIC_ERROR_FILE``. Which rank failed first is then read from fields, not from stderr.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

from .config import take_error_file
from .errors import NO_SEQ, SdpError, quoted

_MOST_LINES = 400


def write_uncaught() -> None:
    """Write the exception that ends this process to its error file, if it has one.

    The first call installs the hook and removes the variable from the environment, because the
    processes that a rank starts are not ranks. Later calls do nothing.
    """
    path = take_error_file()
    if not path:
        return
    pid, previous = os.getpid(), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid:  # not a forked child
            with suppress(Exception):  # must not hide the exception
                _write(path, error)
        previous(kind, error, trace)

    sys.excepthook = hook


def described(error: BaseException) -> dict[str, Any]:
    """An exception as fields; those of an `SdpError` if one is among its causes."""
    found = _sdp_error(error)
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {
        "type": type(error).__name__,
        "text": str(error),
        "kind": "exception" if found is None else found.kind,
        "op": getattr(found, "op", ""),
        "seq": getattr(found, "seq", NO_SEQ),
        "elapsed_s": getattr(found, "elapsed_s", 0.0),
        "ranks": [*getattr(found, "global_ranks", ())],
        "origin_rank": getattr(found, "global_origin_rank", None),
        "is_repeat": getattr(found, "is_repeat", False),
        "traceback": lines[-_MOST_LINES:],
    }


def _write(path: str, error: BaseException) -> None:
    text = json.dumps({"pid": os.getpid(), **described(error)})
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def _sdp_error(error: BaseException) -> SdpError | None:
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
