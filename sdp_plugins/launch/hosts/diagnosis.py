"""Turns the errors of ssh and the MPIs into one line with the remedy."""

from __future__ import annotations

import re
import shlex
import sys

# The first match counts: errors of ssh come before those of a remote shell.
_KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"Could not resolve hostname|Name or service not known|unable to (?:resolve|find) host",
        "there is no host {host!r}: ssh finds no address for its name. Hint: check its spelling, "
        "and ~/.ssh/config.",
    ),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "ssh does not know {host}'s key, or knows another. Hint: run `ssh {host}` once by hand, or "
        "`ssh-keyscan {host} >> ~/.ssh/known_hosts`.",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "{host} refuses ssh without a password. Hint: run `ssh-copy-id {host}`.",
    ),
    (
        r"Connection refused",
        "{host} refuses ssh's connection. Hint: start sshd there, or set its port in "
        "~/.ssh/config.",
    ),
    (
        r"Connection timed out|Operation timed out|No route to host|Network is unreachable",
        "{host} does not answer ssh. Hint: check that it is up and that firewalls allow ssh.",
    ),
    (
        r"No module named '?sdp_plugins",
        "{python} on {host} has no sdp-plugins. Hint: install it there.",
    ),
    (
        r"{python}['\"]?:? (?:No such file|not found|Permission denied|cannot execute)"
        r"|(?:No such file or directory|not found):? ['\"]?{python}",
        "there is no {python} on {host}. Hint: every host needs the same Python at the same path.",
    ),
    (
        r"(?:orted|prted|hydra_pmi_proxy): (?:command )?not found",
        "{host} has no MPI at the same path. Hint: install the same MPI on all hosts.",
    ),
    (
        r"not enough slots available",
        "mpirun finds too few slots. Hint: inside a job of Slurm or PBS, use only hosts and slots "
        "of its allocation.",
    ),
)


def explained(text: str, host: str) -> str:
    """Explain an error that comes from a host; empty if it is not known."""
    python = re.escape(sys.executable)
    for pattern, meaning in _KNOWN:
        if re.search(pattern.replace("{python}", python), text):
            return meaning.format(host=host, python=shlex.quote(sys.executable))
    return ""
