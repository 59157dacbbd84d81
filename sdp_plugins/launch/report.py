"""What the launcher says last: which rank failed first, how, and its traceback."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

LAST_LINES = 20
LONGEST = 80
TRACEBACK = "Traceback (most recent call last):"
CHAINED = re.compile("^(During handling of|The above exception was)", re.MULTILINE)
HINTS = {
    signal.SIGKILL: "Hint: if nobody killed it, the machine ran out of memory; see `dmesg`.",
    signal.SIGBUS: "Hint: a full /dev/shm does this; see `df /dev/shm`.",
    signal.SIGSEGV: "Hint: set PYTHONFAULTHANDLER=1 to see the Python stack of a crash.",
}


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code <= 128:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exit code {code}"


def hint(code: int) -> str:
    """What to look at after such an end; empty if there is nothing to say."""
    return next((text for number, text in HINTS.items() if code == 128 + number), "")


def excerpt(tail: Sequence[bytes]) -> list[str]:
    """The last traceback, with the exceptions it is chained to, or else the last lines."""
    text = b"".join(tail).decode(errors="backslashreplace")
    lines = [line.rpartition("\r")[2] for line in text.rstrip().split("\n")]  # a bar's last state
    starts = [i for i, line in enumerate(lines) if TRACEBACK in line]
    if not starts:
        return lines[-LAST_LINES:] if text.strip() else []
    first = starts.pop()
    while starts and CHAINED.search("\n".join(lines[starts[-1] : first])):
        first = starts.pop()
    lines = lines[first:]
    if len(lines) > LONGEST:
        half = LONGEST // 2
        lines = [*lines[:half], f"  ... {len(lines) - LONGEST} lines ...", *lines[-half:]]
    return lines


def secondary(tail: Sequence[bytes]) -> bool:
    """Whether a rank failed because another one had."""
    return b"PeerLostError" in b"".join(tail)


def failure(rank: int, pid: int, code: int, tail: Sequence[bytes]) -> str:
    """The report about the first failing rank."""
    lines = excerpt(tail)
    how = f"sdp run: rank {rank} (pid {pid}) failed first: {how_it_ended(code)}."
    head = how + (" The end of its stderr:" if lines else " It wrote nothing to stderr.")
    return "\n".join(["", head, *lines, *([hint(code)] if hint(code) else [])])
