"""Lightning's script launcher, with an eye on what it started.

Lightning looks at its children every 5 s and then kills the main process too, often before that has
said which rank was lost. Here the survivors get time to end with their own error first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from subprocess import Popen
from typing import Any

from sdp_plugins.lightning.child_watch import ChildWatch
from sdp_plugins.lightning.namespaces import LightningClass
from sdp_plugins.lightning.parent_watch import LAUNCHER_PID


def watched(launcher: Any) -> Any:
    """`launcher`, or one that watches its children, if it is one that starts the script again."""
    if not hasattr(launcher, "_call_children_scripts"):
        return launcher
    return watched_class(type(launcher))(
        launcher.cluster_environment, launcher.num_processes, launcher.num_nodes
    )


def watched_class(base: type) -> Any:
    """A launcher that stays an instance of the Lightning package's own class."""
    return type("WatchedScriptLauncher", (WatchedLaunch, base), {"__module__": __name__})


class WatchedLaunch(LightningClass):
    """Stands before Lightning's _SubprocessScriptLauncher among the bases."""

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
                del os.environ[LAUNCHER_PID]  # other jobs of this process are not its ranks
            self._watch = ChildWatch(self.procs)
            self._watch.start()
            if not environment.creates_processes_externally:  # not Lightning's own: no LOCAL_RANK
                return function(*args, **kwargs)
        return super().launch(function, *args, **kwargs)

    def end_children(self) -> None:
        """This rank fails: the others have been told; kill those that do not go."""
        if self._watch is not None:
            self._watch.end()
