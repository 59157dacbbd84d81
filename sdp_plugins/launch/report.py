"""What the launcher says last: which rank is to blame, how it failed, and its traceback."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence

LAST_LINES = 20
LONGEST = 80
TRACEBACK = "Traceback (most recent call last):"
IGNORED = "Exception ignored "
# torch starts every line of a traceback with the rank.
CHAINED = re.compile(r"^(\[rank\d+\]: )?(During handling of|The above exception was)", re.MULTILINE)
LOST = re.compile(rb"PeerLostError: (.*)")
CULPRIT = re.compile(rb"[]:] ranks? (\d+)[^:]* (?:gave up|ended|has closed)\b")
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
    starts = [
        i
        for i, line in enumerate(lines)
        if TRACEBACK in line and not (i and lines[i - 1].startswith(IGNORED))
    ]
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


def culprits(tail: Sequence[bytes]) -> list[int]:
    """The ranks that the last PeerLostError names, the root cause last."""
    texts = LOST.findall(b"".join(tail))
    return [int(rank) for rank in CULPRIT.findall(texts[-1])] if texts else []


def blamed(tails: Mapping[int, Sequence[bytes]]) -> int:
    """Which of the failed ranks to report.

    Args:
        tails: The end of each failed rank's stderr, in the order in which they failed.

    Returns:
        The first that failed of its own accord; else the root cause that the first one names, if
        that has failed, too; else the first.
    """
    own = [rank for rank, tail in tails.items() if not secondary(tail)]
    first = next(iter(tails))
    named = [rank for rank in reversed(culprits(tails[first])) if rank in tails]
    return [*own, *named, first][0]


def failure(rank: int, pid: int, code: int, tail: Sequence[bytes]) -> str:
    """The report about the rank that is to blame."""
    lines = excerpt(tail)
    how = f"sdp run: rank {rank} (pid {pid}) failed first: {how_it_ended(code)}."
    head = how + (" The end of its stderr:" if lines else " It wrote nothing to stderr.")
    return "\n".join(["", head, *lines, *([hint(code)] if hint(code) else [])])
