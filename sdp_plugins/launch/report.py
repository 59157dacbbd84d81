"""What the launcher says last: which rank is to blame, how it failed, and its traceback."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from enum import IntEnum

LAST_LINES = 20
LONGEST = 80
MOST_LISTED = 8
TRACEBACK = "Traceback (most recent call last):"
IGNORED = "Exception ignored "
CHAINED = re.compile(r"^(During handling of|The above exception was)", re.MULTILINE)
TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # before every line of a traceback
LOST = re.compile(r"([\w.]+: )*([\w.]+\.)?PeerLostError\b")  # also as another's text
CULPRIT = re.compile(r"[]:] ranks? (\d+)[^:]* (?:gave up|ended|has closed)\b")
HINTS = {
    signal.SIGKILL: "Hint: if nobody killed it, the machine ran out of memory; see `dmesg`.",
    signal.SIGBUS: "Hint: a full /dev/shm does this; see `df /dev/shm`.",
    signal.SIGSEGV: "Hint: set PYTHONFAULTHANDLER=1 to see the Python stack of a crash.",
}


class Kind(IntEnum):
    """How a rank failed: the less, the likelier it is the cause."""

    OWN = 0  # with a traceback of its own, or by a signal
    SILENT = 1  # with an exit code alone: perhaps it has caught the loss of another
    LOST = 2  # because it lost another


def killed_by(code: int) -> signal.Signals | None:
    """The signal that an exit code stands for."""
    try:
        return signal.Signals(code - 128)
    except ValueError:
        return None


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    number = killed_by(code)
    return f"killed by {number.name}" if number else f"exit code {code}"


def hint(code: int) -> str:
    """What to look at after such an end; empty if there is nothing to say."""
    return next((text for number, text in HINTS.items() if code == 128 + number), "")


def lines_of(tail: Sequence[bytes]) -> list[str]:
    """What a terminal would show of it."""
    text = b"".join(tail).decode(errors="backslashreplace").rstrip()
    return [line.rpartition("\r")[2] for line in text.split("\n")] if text else []


def last_chain(lines: Sequence[str]) -> list[int]:
    """Where the last traceback starts, after those of the exceptions it is chained to."""
    starts = [
        i
        for i, line in enumerate(lines)
        if TRACEBACK in line and not (i and lines[i - 1].startswith(IGNORED))
    ]
    chain = starts[-1:]
    for start in reversed(starts[:-1]):
        between = "\n".join(TORCH_PREFIX.sub("", line) for line in lines[start : chain[0]])
        if not CHAINED.search(between):
            break
        chain.insert(0, start)
    return chain


def excerpt(tail: Sequence[bytes]) -> list[str]:
    """The last traceback, with the exceptions it is chained to, or else the last lines."""
    lines = lines_of(tail)
    chain = last_chain(lines)
    if not chain:
        return lines[-LAST_LINES:]
    lines = lines[chain[0] :]
    if len(lines) > LONGEST:
        half = LONGEST // 2
        lines = [*lines[:half], f"  ... {len(lines) - LONGEST} lines ...", *lines[-half:]]
    return lines


def exceptions(tail: Sequence[bytes]) -> list[str]:
    """The exceptions of the last chain: each the first line of its traceback without indent."""
    lines = lines_of(tail)
    plain = [TORCH_PREFIX.sub("", line) for line in lines]
    return [
        next((line for line in plain[start + 1 :] if line[:1].strip()), "")
        for start in last_chain(lines)
    ]


def kind(code: int, tail: Sequence[bytes]) -> Kind:
    """How a rank failed, by its exit code and the end of its stderr."""
    chain = exceptions(tail)
    if any(LOST.match(text) for text in chain):
        return Kind.LOST
    return Kind.OWN if chain or killed_by(code) else Kind.SILENT


def culprits(tail: Sequence[bytes]) -> list[int]:
    """The ranks that the last PeerLostError names, the root cause last."""
    texts = [text for text in exceptions(tail) if LOST.match(text)]
    return [int(rank) for rank in CULPRIT.findall(texts[-1])]


def blamed(codes: Mapping[int, int], tails: Mapping[int, Sequence[bytes]]) -> int:
    """Which of the failed ranks to report.

    Args:
        codes: Their exit codes, in the order in which they failed.
        tails: The end of each one's stderr.

    Returns:
        Of those that are likeliest the cause: the root cause that the first rank to lose another
        names, else the first that failed.
    """
    kinds = {rank: kind(code, tails[rank]) for rank, code in codes.items()}
    lost = [rank for rank in kinds if kinds[rank] is Kind.LOST]
    named = [rank for first in lost[:1] for rank in culprits(tails[first]) if rank in kinds]
    return min([*reversed(named), *kinds], key=kinds.__getitem__)


def listed(ranks: Sequence[int]) -> str:
    """The first of them, and how many there are."""
    shown = ", ".join(map(str, ranks[:MOST_LISTED]))
    more = len(ranks) - MOST_LISTED
    return f"{shown} and {more} more" if more > 0 else shown


def failure(
    program: str, rank: int, where: str, code: int, tail: Sequence[bytes], ended: Sequence[int] = ()
) -> str:
    """What the program says about the rank that is to blame.

    Args:
        program: What the user has called.
        rank: Which.
        where: Its process.
        code: Its exit code.
        tail: The end of its stderr.
        ended: Ranks that had ended before, with 0: this one may have waited for them.
    """
    lines = excerpt(tail)
    how = f"{program}: rank {rank} ({where}) failed first: {how_it_ended(code)}"
    how += f", after rank {listed(ended)} had ended without an error." if ended else "."
    head = how + (" The end of its stderr:" if lines else " It wrote nothing to stderr.")
    return "\n".join(["", head, *lines, *([hint(code)] if hint(code) else [])])
