"""Environment variables."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterator

from sdp_plugins.core.config import DEPRECATED, ERROR_FILE, VARIABLES, Config
from sdp_plugins.core.topology import Topology
from sdp_plugins.doctor.finding import Finding, error, ok, skipped, text_and_remedy, warning
from sdp_plugins.doctor.importing import IMPORT_S
from sdp_plugins.doctor.machine import Machine
from sdp_plugins.launch.answers import answer_of
from sdp_plugins.launch.hosts.agent_messages import TOKEN

_KNOWN = {*VARIABLES, *DEPRECATED, ERROR_FILE, TOKEN, "SDP_LAUNCHER_PID", "SDP_LAUNCH_END"}
_NOT_LOADED = re.compile(r"object '(.+)' from LD_PRELOAD cannot be preloaded \((.+?)\)")


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
    """A program that starts loads the libraries of LD_PRELOAD."""
    given = machine.environment.get("LD_PRELOAD", "")
    if not given.strip(" :"):
        yield skipped("LD_PRELOAD is not set")
        return
    started = answer_of([machine.python, "-ISc", ""], machine.environment, IMPORT_S)
    missing = _NOT_LOADED.findall(started.stderr)  # what the dynamic linker writes
    for name, reason in missing:
        yield warning(
            f"LD_PRELOAD names {name}, which no rank loads ({reason})",
            "unset LD_PRELOAD, or install that library",
        )
    if not missing:
        yield ok(f"LD_PRELOAD loads {given}")
