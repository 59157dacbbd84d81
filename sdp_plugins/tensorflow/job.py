"""The job that this process is part of, from ``init`` to ``shutdown``."""

from __future__ import annotations

from sdp_plugins.core import Group

from .collectives import TensorFlowCollectives


class Current:
    """This process's job, if there is one."""

    def __init__(self) -> None:
        self._collectives: TensorFlowCollectives | None = None

    def begin(self, group: Group | None = None) -> None:
        """Connect to the other ranks.

        Raises:
            RuntimeError: The ranks are already connected.
        """
        if self._collectives is not None:
            raise RuntimeError(
                "init() called more than once. smdistributed.dataparallel is already initialized."
            )
        group = Group.from_env(name="tensorflow") if group is None else group
        self._collectives = TensorFlowCollectives(group)

    def join(self, group: Group | None = None) -> TensorFlowCollectives:
        """Return the job's collectives; begin a job if there is none.

        Raises:
            RuntimeError: The job has another group.
        """
        if self._collectives is None:
            self.begin(group)
        elif group is not None and group is not self.collectives.group:
            raise RuntimeError("the job has another group. Hint: call shutdown() first.")
        return self.collectives

    def end(self) -> None:
        """Leave the job; without a job nothing happens."""
        ending, self._collectives = self._collectives, None
        if ending is not None:
            ending.group.close()

    @property
    def collectives(self) -> TensorFlowCollectives:
        """The collectives of the job, which have its group.

        Raises:
            RuntimeError: There is no job.
        """
        if self._collectives is None:
            raise RuntimeError("this needs a job. Hint: call init() first.")
        return self._collectives


current = Current()
