"""Lightning's launchers: of scripts, with faster detection of failed ranks; and of forked ranks.

Lightning polls its children every 5 s and then kills the main process too, often before that has
reported which rank was lost. This launcher gives the survivors time to end with their own error.
Forked ranks, as in a notebook, start without threads of OpenMP.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import time
from collections.abc import Callable, Collection
from subprocess import Popen
from typing import Any

from sdp_plugins.lightning.child_watch import ChildWatch
from sdp_plugins.lightning.namespaces import LightningClass
from sdp_plugins.lightning.openmp import end_openmp_threads
from sdp_plugins.lightning.parent_watch import LAUNCHER_PID

END_S = 10.0


def watched(launcher: Any) -> Any:
    """`launcher`, or a replacement that watches the scripts it starts, or prepares its forks."""
    if getattr(launcher, "_start_method", None) == "fork":
        bases: Any = (PreparedFork, type(launcher))
        made = type("PreparedForkLauncher", bases, {"__module__": __name__})
        return made(launcher._strategy, start_method="fork")
    if not hasattr(launcher, "_call_children_scripts"):
        return launcher
    bases = (WatchedLaunch, type(launcher))
    return type("WatchedScriptLauncher", bases, {"__module__": __name__})(
        launcher.cluster_environment, launcher.num_processes, launcher.num_nodes
    )


class PreparedFork(LightningClass):
    """A mixin for the _MultiProcessingLauncher of any Lightning package."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Fork the ranks, which call the function."""
        end_openmp_threads()
        others = {*multiprocessing.active_children()}
        try:
            return super().launch(function, *args, **kwargs)
        except KeyboardInterrupt:  # a notebook may interrupt this process alone
            _end({*multiprocessing.active_children()} - others)
            raise


def _end(ranks: Collection[multiprocessing.process.BaseProcess]) -> None:
    """Have processes end by SIGTERM, and those that take too long by SIGKILL."""
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + END_S
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        rank.kill()
        rank.join()


class WatchedLaunch(LightningClass):
    """A mixin for the _SubprocessScriptLauncher of any Lightning package."""

    cluster_environment: Any
    procs: list[Popen[bytes]]
    num_processes: int
    num_nodes: int
    _watch: ChildWatch | None = None

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the other ranks unless they run already, then call the function."""
        environment = self.cluster_environment
        if not environment.creates_processes_externally:
            environment.validate_settings(self.num_processes, self.num_nodes)
            os.environ[LAUNCHER_PID] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                del os.environ[LAUNCHER_PID]  # later jobs of this process are not its ranks
            self._watch = ChildWatch(self.procs)
            self._watch.start()
            # The base would start them again if the environment, not being Lightning's own, does
            # not recognise the variables of a rank.
            if not environment.creates_processes_externally:
                return function(*args, **kwargs)
        return super().launch(function, *args, **kwargs)

    def end_children(self) -> None:
        """Kill the other ranks that do not end by themselves after this one has failed."""
        if self._watch is not None:
            self._watch.end()
