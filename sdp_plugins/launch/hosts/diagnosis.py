"""What ssh and the MPIs say when they cannot start a job, in one line with the remedy."""

from __future__ import annotations

import re
import shlex
import sys

# The first that is found counts: what a shell says comes after what ssh has said.
_KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"Could not resolve hostname|Name or service not known|unable to (?:resolve|find) host",
        "there is no host {host!r}: ssh finds no address for its name. Hint: check its spelling, "
        "and ~/.ssh/config.",
    ),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "ssh does not know {host}'s key, or knows another. Hint: `ssh {host}` once by hand, or "
        "`ssh-keyscan {host} >> ~/.ssh/known_hosts`.",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "{host} refuses ssh without a password. Hint: `ssh-copy-id {host}` gives it your key.",
    ),
    (
        r"Connection refused",
        "{host} refuses ssh's connection. Hint: start sshd there, or name its port in "
        "~/.ssh/config.",
    ),
    (
        r"Connection timed out|Operation timed out|No route to host|Network is unreachable",
        "{host} does not answer ssh. Hint: is it switched on, and does a firewall let ssh pass?",
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
        "{host} has no MPI at the same path. Hint: install the same MPI everywhere.",
    ),
    (
        r"not enough slots available",
        "mpirun finds too few slots. Hint: inside of another job (Slurm, PBS) hosts and slots have "
        "to be of its allocation.",
    ),
)


def explained(text: str, host: str) -> str:
    """What a known complaint means; empty if it is not known.

    Args:
        text: The complaint.
        host: Whose it is.
    """
    python = re.escape(sys.executable)
    for pattern, meaning in _KNOWN:
        if re.search(pattern.replace("{python}", python), text):
            return meaning.format(host=host, python=shlex.quote(sys.executable))
    return ""
