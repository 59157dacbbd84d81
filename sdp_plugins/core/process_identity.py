"""Names for processes that stay unique although the kernel reuses process ids."""

from __future__ import annotations

import os

_MAX_DEPTH = 64


def clock_id() -> str:
    """Equal for processes that share CLOCK_MONOTONIC: those of one boot of one kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def namespace(kind: str) -> int:
    """Identifies this process's namespace of a kind, such as ``pid`` or ``net``; 0 if unknown."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def process_identity(pid: int) -> str:
    """Return ``pid@start``, where start is the process's start time in clock ticks since boot.

    The start is ``0`` where /proc cannot be read; the pid alone is then the identity.
    """
    stat = stat_fields(pid)
    return f"{pid}@{stat[19] if stat else 0}"


def process_state(identity: str) -> str:
    """The state of a process, a letter as in /proc/PID/stat; empty if it has ended."""
    stat = stat_fields(int(identity.partition("@")[0]))
    same = bool(stat) and f"@{stat[19]}" == identity[identity.find("@") :]
    return stat[0] if same and stat[0] not in "ZX" else ""


def process_command(identity: str) -> str:
    """The command line of a process, without the interpreter's path; empty if it has ended."""
    pid = int(identity.partition("@")[0])
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    if not process_state(identity):  # checked afterwards: the id may have been reused
        return ""
    return " ".join([os.path.basename(words[0]), *words[1:]])


def own_pid(pid: int) -> int:
    """The id of a process in its own pid namespace, such as a container's."""
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            ids = next((line for line in file if line.startswith("NSpid:")), "")
    except OSError:
        ids = ""
    return int(ids.split()[-1]) if ids else pid


def parents(pid: int) -> list[int]:
    """The processes above one, the nearest first; process 1 may be a container's launcher."""
    found: list[int] = []
    while len(found) < _MAX_DEPTH and (stat := stat_fields(pid)):
        pid = int(stat[1])
        if pid < 1:
            break
        found.append(pid)
    return found


def launcher_identity(marker: str) -> str:
    """Return the identity of the process that started this rank; see ``launching_process``."""
    return process_identity(launching_process(marker))


def launching_process(marker: str) -> int:
    """Return the id of the process that started this rank.

    That is the nearest ancestor whose own environment does not hold the launcher's per-rank
    variable: the direct parent may be a wrapper (a shell, ``numactl``, a profiler) that every rank
    has for itself.

    Args:
        marker: A variable that the launcher sets for ranks, such as ``PMI_RANK``.
    """
    pid = os.getppid()
    for _ in range(_MAX_DEPTH):
        if not _has_variable(pid, marker):
            break
        stat = stat_fields(pid)
        parent = int(stat[1]) if stat else 0
        if parent <= 0:
            break
        pid = parent
    return pid


def stat_fields(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            text = file.read()
    except OSError:
        return []
    # The command stands in parentheses and may hold blanks and parentheses itself.
    return text.rpartition(")")[2].split()


def _has_variable(pid: int, name: str) -> bool:
    """Whether the process was started with the variable; False if that cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            block = file.read()
    except OSError:
        return False
    return any(entry.startswith(name.encode() + b"=") for entry in block.split(b"\0"))
