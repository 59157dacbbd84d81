"""The job that this process is part of, from ``init`` to ``shutdown``."""

from __future__ import annotations

from dataclasses import dataclass

from sdp_plugins.core import Group

from .collectives import Collectives


@dataclass
class Job:
    """A group, and its collectives on tensors."""

    group: Group
    collectives: Collectives


class Current:
    """This process's job, if there is one."""

    def __init__(self) -> None:
        self._job: Job | None = None

    def begin(self, group: Group | None = None) -> None:
        """Connect to the other ranks.

        Raises:
            RuntimeError: The ranks are already connected.
        """
        if self._job is not None:
            raise RuntimeError(
                "init() called more than once. smdistributed.dataparallel is already initialized."
            )
        group = Group.from_env(name="tensorflow") if group is None else group
        self._job = Job(group, Collectives(group))

    def join(self, group: Group | None = None) -> Job:
        """Return the job; begin one if there is none.

        Raises:
            RuntimeError: The job has another group.
        """
        if self._job is None:
            self.begin(group)
        elif group is not None and group is not self._job.group:
            raise RuntimeError("the job has another group. Hint: call shutdown() before.")
        return self.job

    def end(self) -> None:
        """Leave the job; without a job nothing happens."""
        job, self._job = self._job, None
        if job is not None:
            job.group.close()

    @property
    def job(self) -> Job:
        """The job.

        Raises:
            RuntimeError: There is no job.
        """
        if self._job is None:
            raise RuntimeError("this needs a job. Hint: call init() before.")
        return self._job


current = Current()
