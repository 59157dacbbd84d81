"""The hosts of a job and their numbers of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from sdp_plugins.launch.hosts import LaunchError

_SLOT_COUNT = re.compile(r"[0-9]{1,6}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # not an option of ssh
_SLOTS = re.compile(r"slots\s*=\s*", re.IGNORECASE)


Slots = dict[str, int | None]
"""The hosts, as the user wrote them, and how many ranks each takes; None if not given."""


def parse_hosts(text: str) -> Slots:
    """Parse `a:4,b:4` or `a,b`; the slots of a repeated name are added up at its first place.

    Raises:
        LaunchError: The text is not a list of hosts.
    """
    parts = [part.strip() for part in text.split(",")]
    found: Slots = {}
    for part in parts:
        if part:
            _add(found, part, f"--hosts {text!r}")
    return found


def parse_hostfile(path: Path) -> Slots:
    """Read a file with one host per line: `a slots=4` (Open MPI), `a:4` (MPICH) or `a`.

    Raises:
        LaunchError: The file cannot be read, or a line has another form.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise LaunchError(f"cannot read the hostfile {path}: {reason}") from None
    found: Slots = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            _add(found, _as_colon(text), f"{path}, line {number}: {text!r}")
    return found


def _as_colon(text: str) -> str:
    """Open MPI's `a slots=4 max_slots=8` as MPICH's `a:4`."""
    name, _, rest = _SLOTS.sub("slots=", text.replace("\t", " ")).partition(" ")
    options = dict(option.partition("=")[::2] for option in rest.split())
    slots = options.pop("slots", None)
    options.pop("max_slots", "")
    options.pop("max-slots", "")
    if options:
        return f"{name} {' '.join(options)}"  # not a valid name, so it is refused
    return name if slots is None else f"{name}:{slots}"


def _add(found: Slots, text: str, where: str) -> None:
    """Add NAME or NAME:SLOTS to the hosts found so far."""
    name, colon, slots = text.partition(":")
    if "@" in name:
        raise LaunchError(
            f"{where}: {text!r} names a user. Hint: set the user in ~/.ssh/config (Host NAME, User "
            "NAME)."
        )
    if not _NAME.fullmatch(name) or (colon and not _SLOT_COUNT.fullmatch(slots)):
        raise LaunchError(
            f"{where}: {text!r} is not a host. Hint: write NAME or NAME:SLOTS (in a hostfile also "
            "NAME slots=SLOTS, and no other option); an IPv6 address needs a name."
        )
    if colon and not int(slots):
        raise LaunchError(f"{where}: {name} has no slot. Hint: remove it, or give it one.")
    number = int(slots) if colon else None
    found[name] = (found[name] or 1) + (number or 1) if name in found else number


def placed(hosts: Mapping[str, int | None], ranks: int | None) -> dict[str, int]:
    """Assign `ranks` (None: as many as there are slots) to hosts; those without any are left out.

    A host without a number of slots has one. If no host has a number, `ranks` are spread evenly,
    with one more on the first hosts.

    Raises:
        LaunchError: There are no hosts, or too few slots.
    """
    if not hosts:
        raise LaunchError("the list of hosts is empty. Hint: --hosts a:4,b:4 starts eight ranks.")
    if ranks is not None and not any(hosts.values()):
        each, more = divmod(ranks, len(hosts))
        shares = [each + (i < more) for i in range(len(hosts))]
    else:
        shares = _filled([slots or 1 for slots in hosts.values()], ranks)
    return {name: share for name, share in zip(hosts, shares, strict=True) if share}


def _filled(slots: Sequence[int], ranks: int | None) -> list[int]:
    """Fill the hosts in order."""
    left = sum(slots) if ranks is None else ranks
    if left > sum(slots):
        raise LaunchError(
            f"-n {ranks}: the hosts have {sum(slots)} slots. Hint: give them more slots (a:4,b:4), "
            "or start fewer ranks."
        )
    shares = []
    for number in slots:
        shares.append(min(number, left))
        left -= shares[-1]
    return shares
