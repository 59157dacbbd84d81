"""One rank's attempt to make a group: its names and its deadline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import PeerLostError, RendezvousError, RendezvousTimeoutError, SdpError
from ..rank_names import RankNames
from .deadline import Deadline
from .failure import Kind, RendezvousFailure

OP = "rendezvous"
DOCTOR = "`sdp doctor` looks for causes on this machine."
_ERRORS: dict[Kind, type[SdpError]] = {
    Kind.REFUSED: RendezvousError,
    Kind.LOST: PeerLostError,
    Kind.MISSING: RendezvousTimeoutError,
}


@dataclass(frozen=True)
class RendezvousContext:
    """One rank's attempt to bring up one group.

    Attributes:
        rank: Rank in the group.
        names: The group and its ranks.
        deadline: When the attempt ends.
    """

    rank: int
    names: RankNames
    deadline: Deadline

    @property
    def world_size(self) -> int:
        """Number of ranks of the group."""
        return self.names.world_size

    @contextmanager
    def raising_errors(self) -> Iterator[None]:
        """Raise failures, and failed system calls, as errors of this rank."""
        try:
            yield
        except RendezvousFailure as failed:
            raise self.error(failed) from failed.__cause__
        except OSError as error:
            raise self.error(RendezvousFailure.system(error)) from error

    def error(self, failure: RendezvousFailure) -> SdpError:
        """The error that this rank raises for a failure."""
        prefix = self.names.error_prefix(self.rank)
        text = f"{prefix}{OP}: {failure.what}. Hint: {failure.hint}. {DOCTOR}"
        elapsed_s = self.deadline.elapsed_s
        return _ERRORS[failure.kind](text, ranks=failure.ranks, op=OP, elapsed_s=elapsed_s)
