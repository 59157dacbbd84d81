"""The launcher's last lines: the rank to blame, how it failed, and its traceback."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from sdp_plugins.core.error_file import RankError
from sdp_plugins.core.rank_names import name_ranks

LAST_LINES = 20
LONGEST = 80
COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # of Python 3.13, for example, on a terminal
TRACEBACK = "Traceback (most recent call last):"
IGNORED = "Exception ignored "
CHAINED = re.compile(
    r"^(\[rank\d+\]: ?)?(During handling of|The above exception was)", re.MULTILINE
)
HINTS: dict[signal.Signals | None, str] = {
    signal.SIGKILL: "Hint: if nobody killed it, the machine ran out of memory: see `dmesg`.",
    signal.SIGBUS: "Hint: /dev/shm may be full: see `df /dev/shm`.",
    signal.SIGSEGV: "Hint: set PYTHONFAULTHANDLER=1 to see the Python stack of a crash.",
}


class FailureOrigin(IntEnum):
    """How a rank failed: the lower, the more likely it is the cause."""

    OWN = 0  # with its own traceback, or by a signal
    SILENT = 1  # with an exit code only: it may have caught the loss of another rank
    LOST = 2  # because it lost another rank


def killed_by(code: int) -> signal.Signals | None:
    """The signal of an exit code; None if there is none."""
    try:
        return signal.Signals(code - 128)
    except ValueError:
        return None


def how_it_ended(code: int) -> str:
    """Describe an exit code."""
    number = killed_by(code)
    return f"killed by {number.name}" if number else f"exit code {code}"


def lines_of(tail: Sequence[bytes]) -> list[str]:
    """The lines that a terminal would show, without colours."""
    text = COLOUR.sub("", b"".join(tail).decode(errors="backslashreplace")).rstrip()
    return [line.rpartition("\r")[2] for line in text.split("\n")] if text else []


def last_chain(lines: Sequence[str]) -> list[int]:
    """The starts of the last traceback and of those it is chained to, in order."""
    starts = [
        i
        for i, line in enumerate(lines)
        if TRACEBACK in line and not (i and lines[i - 1].startswith(IGNORED))
    ]
    chain = starts[-1:]
    for start in reversed(starts[:-1]):
        if not CHAINED.search("\n".join(lines[start : chain[0]])):
            break
        chain.insert(0, start)
    return chain


def shortened(lines: list[str]) -> list[str]:
    """Cut the middle out of a long traceback."""
    if len(lines) <= LONGEST:
        return lines
    half = LONGEST // 2
    return [*lines[:half], f"  ... {len(lines) - LONGEST} lines ...", *lines[-half:]]


def excerpt(tail: Sequence[bytes]) -> list[str]:
    """The last traceback, with the exceptions it is chained to, or else the last lines."""
    lines = lines_of(tail)
    chain = last_chain(lines)
    return shortened(lines[chain[0] :]) if chain else lines[-LAST_LINES:]


@dataclass(frozen=True)
class FailedRank:
    """How a rank failed.

    Attributes:
        code: Its exit code.
        error: The exception that ended it; None if it reported none.
        tail: The end of its stderr.
        where: Its process.
    """

    code: int
    error: RankError | None = None
    tail: Sequence[bytes] = ()
    where: str = ""

    @property
    def kind(self) -> FailureOrigin:
        """Whether it is likely to be the cause.

        A rank that has not imported this package has no error file, but may have written a
        traceback.
        """
        if self.error:
            return FailureOrigin.LOST if self.error.is_loss else FailureOrigin.OWN
        own = killed_by(self.code) or last_chain(lines_of(self.tail))
        return FailureOrigin.OWN if own else FailureOrigin.SILENT

    @property
    def lines(self) -> list[str]:
        """The lines to show."""
        if self.error and self.error.traceback:
            return shortened(self.error.traceback)
        return excerpt(self.tail)

    @property
    def blames(self) -> Sequence[int]:
        """The ranks that it names as the cause, the most likely one last, if it lost one."""
        return self.error.blames if self.error and self.kind is FailureOrigin.LOST else ()

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks for which it waited until the time-out."""
        return self.error.ranks if self.error and self.error.kind == "timeout" else ()


def blamed(failures: Mapping[int, FailedRank]) -> int:
    """Which of the failed ranks, in the order in which they failed, to report.

    Among the most likely causes, it is the rank that the first rank to lose another names as the
    root cause; otherwise the first that failed.
    """
    first = next((failure.blames for failure in failures.values() if failure.blames), ())
    named = [rank for rank in first if rank in failures]
    return min([*reversed(named), *failures], key=lambda rank: failures[rank].kind)


def described(program: str, rank: int, failure: FailedRank, ended: Sequence[int] = ()) -> str:
    """Compose the report of the rank to blame.

    The ranks in `ended` had ended with 0 before; it may have waited for them.
    """
    who = f"rank {rank} ({failure.where})"
    how = f"{program}: {who} failed first: {how_it_ended(failure.code)}"
    if failure.absent and failure.error:
        op, seq = failure.error.op or "operation", failure.error.seq
        op = f"{op} #{seq}" if seq >= 0 else f"the {op}"  # such as the rendezvous
        how = (
            f"{program}: {name_ranks(failure.absent)} did not arrive at {op} in "
            f"{failure.error.elapsed_s:.3g} s; {who} waited and "
            f"failed: {how_it_ended(failure.code)}"
        )
    how += f", after {name_ranks(ended)} had ended without an error." if ended else "."
    lines, text = failure.lines, HINTS.get(killed_by(failure.code), "")
    head = how + (" The end of its stderr:" if lines else " It wrote nothing to stderr.")
    return "\n".join(["", head, *lines, *([text] if text else [])])
