"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(str, Enum):
    """How bad it is, worst first."""

    error = "error"  # smddp, or a part of it, does not work
    warning = "warning"  # it works, but slowly, or will fail later
    skipped = "skipped"  # nothing to look at here
    ok = "ok"


@dataclass(frozen=True)
class Finding:
    """One result of one check.

    Attributes:
        status: How bad it is.
        text: One sentence: what is so, or why the check was skipped.
        remedy: A command or setting; empty if nothing needs to be done.
        slows: Whether it makes collectives slower.
        subject: What the check is about; set by whoever runs it, as is the next.
        check: The check's name.
    """

    status: Status
    text: str
    remedy: str = ""
    slows: bool = False
    subject: str = ""
    check: str = ""

    @property
    def is_problem(self) -> bool:
        """Whether the user should do something."""
        return self.status in (Status.error, Status.warning)


def text_and_remedy(told: str) -> tuple[str, str]:
    """The parts of an error of this package, whose remedy follows "Hint:"; it may have none."""
    text, _, remedy = told.partition(" Hint: ")
    return text.rstrip("."), remedy.rstrip(".")


def ok(text: str) -> Finding:
    """All is well."""
    return Finding(Status.ok, text)


def skipped(why: str) -> Finding:
    """There is nothing to look at here."""
    return Finding(Status.skipped, why)


def warning(text: str, remedy: str, *, slows: bool = False) -> Finding:
    """It works, but slowly, or will fail later."""
    return Finding(Status.warning, text, remedy, slows)


def error(text: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(Status.error, text, remedy)
