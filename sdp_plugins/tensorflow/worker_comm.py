"""A communicator for Python objects, with mpi4py's interface."""

from __future__ import annotations

import pickle
from typing import Any

from sdp_plugins.core import Group

from .job import current


class WorkerComm:
    """The commonly used methods of an mpi4py communicator, for objects among all ranks."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def Get_rank(self) -> int:  # noqa: N802  mpi4py's name
        """Return this rank."""
        return self._group.rank

    def Get_size(self) -> int:  # noqa: N802
        """Return the number of ranks."""
        return self._group.world_size

    def Barrier(self) -> None:  # noqa: N802
        """Wait for all ranks."""
        self._group.barrier()

    barrier = Barrier

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return all ranks' objects, in rank order."""
        return [pickle.loads(blob) for blob in self._group.exchange(pickle.dumps(sendobj))]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return all ranks' objects on `root`; None elsewhere."""
        objects = self.allgather(sendobj)
        return objects if self._group.rank == root else None

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of the rank `root`."""
        return self.allgather(obj if self._group.rank == root else None)[root]


def get_worker_comm() -> WorkerComm:
    """Return a communicator for Python objects among all ranks."""
    return WorkerComm(current.collectives.group)
