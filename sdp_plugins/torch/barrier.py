"""barrier and monitored_barrier."""

# c10d types each form of a call as an overload; here one signature accepts all of them.
# mypy: disable-error-code="override"

from __future__ import annotations

from datetime import timedelta

from sdp_plugins.core import CollectiveTimeoutError
from sdp_plugins.core.rank_names import name_ranks
from sdp_plugins.torch.options import UNSET, Options, call_options
from sdp_plugins.torch.process_group_lifecycle import ProcessGroupBase
from sdp_plugins.torch.torch_dispatch import dispatched
from sdp_plugins.torch.work import Work

AT_ONCE_S = 1e-3


class Barrier(ProcessGroupBase):
    """Operations that wait for all ranks."""

    @dispatched
    def barrier(self, opts: Options = None, timeout: timedelta | None = None) -> Work:
        """Wait for all ranks."""
        return self._run("barrier", [self._current_group().barrier], call_options(opts, timeout))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; an error names all missing ranks, whatever `wait_all_ranks` is.

        Args:
            timeout: How long to wait; zero does not wait, None means the group's timeout.
            wait_all_ranks: Accepted for compatibility with gloo.

        Raises:
            CollectiveTimeoutError: Ranks are missing; the message ends with gloo's wording.
        """
        limit_s = None if timeout in (None, UNSET) else max(timeout.total_seconds(), AT_ONCE_S)
        group = self._current_group()
        try:
            group.barrier(timeout_s=limit_s)
        except CollectiveTimeoutError as error:
            missing = name_ranks(map(group.global_rank, error.ranks)).capitalize()
            this = group.global_rank(self.rank())
            error.args = (
                f"{error} Rank {this} timed out in monitoredBarrier after "
                f"{error.elapsed_s * 1000:.0f} ms: {missing} failed to pass monitoredBarrier.",
            )
            raise
