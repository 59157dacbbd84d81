"""Environment variables."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from sdp_plugins.core.config import DEPRECATED, ERROR_FILE, VARIABLES, Config
from sdp_plugins.core.topology import Topology
from sdp_plugins.doctor.finding import Finding, error, ok, skipped, text_and_remedy, warning
from sdp_plugins.doctor.machine import Machine
from sdp_plugins.launch.hosts.agent_messages import TOKEN

_KNOWN = {*VARIABLES, *DEPRECATED, ERROR_FILE, TOKEN, "SDP_LAUNCHER_PID", "SDP_LAUNCH_END"}


def settings(machine: Machine) -> Iterator[Finding]:
    """The values of SDP_ variables can be read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            Config.from_env(machine.environment)
        except ValueError as failed:
            text, remedy = text_and_remedy(str(failed))
            yield error(text, f"set it to {remedy}, or unset it")
            return
    for outdated in caught:
        if issubclass(outdated.category, FutureWarning):
            text = str(outdated.message)
            yield warning(text.rstrip("."), f"unset {text.split()[0]}")
    names = [name for name in VARIABLES if machine.environment.get(name)]
    yield ok(f"{len(names)} settings are made by variables")


def unknown_variables(machine: Machine) -> Iterator[Finding]:
    """Every SDP_ variable is one that the package reads."""
    given = sorted(name for name in machine.environment if name.startswith("SDP_"))
    unknown = [name for name in given if name not in _KNOWN]
    for name in unknown:
        meant = difflib.get_close_matches(name, VARIABLES, 1, cutoff=0.6)
        remedy = f"export {meant[0]}=..., if that is what was meant; " if meant else ""
        yield warning(f"sdp_plugins has no variable {name}", f"{remedy}unset {name}")
    if not unknown:
        yield ok("there is no misspelt variable")


def launchers(machine: Machine) -> Iterator[Finding]:
    """The variables of one launcher say which rank this is, or those of several agree."""
    try:
        place = Topology.from_env(machine.environment)
    except ValueError as failed:
        text, remedy = text_and_remedy(str(failed))
        yield error(text, remedy or "unset the variables of one of the launchers")
        return
    if place.source == "single":
        yield ok("this process is no rank of a job")
    else:
        yield ok(f"this is rank {place.rank} of {place.world_size}, says {place.source}")


def preloaded(machine: Machine) -> Iterator[Finding]:
    """The libraries of LD_PRELOAD exist."""
    given = machine.environment.get("LD_PRELOAD", "").replace(":", " ").split()
    missing = [name for name in given if os.sep in name and not Path(name).exists()]
    if not given:
        yield skipped("LD_PRELOAD is not set")
    elif missing:
        yield warning(
            f"LD_PRELOAD names {missing[0]}, which does not exist, so no rank loads it",
            "unset LD_PRELOAD, or install that library",
        )
    else:
        yield ok(f"LD_PRELOAD loads {', '.join(given)}")
