"""What an error says, beside its text, of who waited for whom."""

from __future__ import annotations

from .members import members


def explain(error: BaseException, token: int) -> None:
    """Add the note of the group that has failed; before Python 3.11 errors have no notes.

    Args:
        error: That is about to be raised.
        token: The group's.
    """
    note = members.note(token)
    if note and hasattr(error, "add_note"):
        error.add_note(note)
