"""The job that this process is part of: what ``init`` begins and ``shutdown`` ends."""

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
        """Meet the other ranks.

        Raises:
            RuntimeError: They have met.
        """
        if self._job is not None:
            raise RuntimeError(
                "init() called more than once. smdistributed.dataparallel is already initialized."
            )
        group = Group.from_env(name="tensorflow") if group is None else group
        self._job = Job(group, Collectives(group))

    def join(self, group: Group | None = None) -> Job:
        """The job, begun if there is none.

        Raises:
            RuntimeError: It has another group than this one.
        """
        if self._job is None:
            self.begin(group)
        elif group is not None and group is not self._job.group:
            raise RuntimeError("the job has another group. Hint: call shutdown() before.")
        return self.job

    def end(self) -> None:
        """Leave; nothing happens without a job."""
        job, self._job = self._job, None
        if job is not None:
            job.group.close()

    @property
    def job(self) -> Job:
        """The job.

        Raises:
            RuntimeError: There is none.
        """
        if self._job is None:
            raise RuntimeError("this needs a job. Hint: call init() before.")
        return self._job


current = Current()
