"""What a rank says first when it connects to another one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .handle import Handle
from .roster import Member, Roster

_VERSION = 1


class VersionError(ValueError):
    """Raised for a hello of another version of the protocol."""


@dataclass(frozen=True)
class Hello:
    """A rank's introduction.

    Attributes:
        member: The rank.
        roster: The ranks of the job as it knows them; None: it asks to join.
        suspects: Those that it has missed in an operation.
    """

    member: Member
    roster: Roster | None
    suspects: frozenset[Handle] = frozenset()

    def to(self, handle: Handle) -> dict[str, Any]:
        """The message to the process with a handle."""
        return {
            "version": _VERSION,
            "secret": handle.secret,
            "member": [self.member.number, str(self.member.handle)],
            "roster": self.roster and self.roster.to_json(),
            "suspects": [str(suspect) for suspect in self.suspects],
        }

    @classmethod
    def read(cls, message: dict[str, Any], secret: str) -> Hello:
        """Read a message to the process with a secret.

        Raises:
            VersionError: It is of another version.
            ValueError: It is no hello, or its sender does not know the secret.
        """
        try:
            if message["secret"] != secret:
                raise ValueError("a wrong secret")
            if message["version"] != _VERSION:
                raise VersionError(f"version {message['version']!r} of the protocol")
            number, handle = message["member"]
            roster = message["roster"]
            return cls(
                Member(int(number), Handle.parse(handle)),
                None if roster is None else Roster.from_json(roster),
                frozenset(map(Handle.parse, message["suspects"])),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no hello ({error})") from None


def names(members: Collection[Member]) -> str:
    """Members for a message: ``rank 2 (10.0.0.1:4711)``."""
    return ", ".join(f"rank {m.number} ({m.handle.where})" for m in members)
