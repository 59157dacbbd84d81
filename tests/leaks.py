"""What a test must give back: processes, threads, descriptors, shared memory, environment.

with no_leaks():       # also useful inside a rank
    group.close()
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

GRACE_S = 30.0
"""How long what is ending may take. Only a leak takes all of it."""
CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
KINDS = ("processes", "threads", "fds", "shm", "env")

# Libraries whose thread pools start at their first use and last as long as the process. Only where
# one of them is loaded are unnamed native threads tolerated; ours are named "sdp...".
POOLED = ("torch", "numpy", "scipy", "sklearn", "tensorflow", "jax")
KEPT_ENV = {
    "PYTEST_CURRENT_TEST": "pytest changes it for every phase",
    "PYTEST_VERSION": "pytest",
    "KMP_INIT_AT_FORK": "scikit-learn and Intel's OpenMP set it once, when imported",
    "KMP_DUPLICATE_LIB_OK": "scikit-learn sets it once, when imported",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "Lightning sets it once, when imported",
    "TORCHINDUCTOR_CACHE_DIR": "torch._inductor sets it once, at its first use",
    "TF2_BEHAVIOR": "TensorFlow sets it once, when imported",
    "TPU_ML_PLATFORM": "TensorFlow sets it once, when imported",
}
KEPT_FDS = {
    "/dev/urandom": "libraries keep one open for random numbers",
    "/sys/devices/system/cpu": "OpenMP keeps the topology open",
    "/memfd:sdp-malloc (deleted)": "blocks of the C library's allocator lie there",
}


_shared_memory_is_ours = False  # set once, before the first test


@dataclass(frozen=True)
class Snapshot:
    """What this process holds now."""

    processes: dict[int, str]
    threads: dict[int, str]
    fds: dict[int, str]
    shm: set[str]
    env: dict[str, str]

    @classmethod
    def take(cls) -> Snapshot:
        """Look at this process."""
        return cls(
            processes=child_processes(),
            threads=native_threads(),
            fds=descriptors(),
            shm=shared_memory(),
            env={k: v for k, v in os.environ.items() if k not in KEPT_ENV},
        )


def child_processes() -> dict[int, str]:
    """All descendants that still run, with their command lines."""
    found = {}
    for pid in descendants():
        with suppress(psutil.NoSuchProcess):
            child = psutil.Process(pid)
            if child.status() != psutil.STATUS_ZOMBIE:
                found[pid] = " ".join(child.cmdline()) or child.name()
    return found


def descendants() -> set[int]:
    """All processes below this one, without a look at all others of the machine if possible."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return {child.pid for child in psutil.Process().children(recursive=True)}
    before, found = None, listed_below(os.getpid())
    while found != before:  # the kernel may leave some out while others end
        before, found = found, listed_below(os.getpid())
    return found


def listed_below(pid: int) -> set[int]:
    """What the kernel lists as a process's children now, and as theirs."""
    found: set[int] = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):
                # Unbuffered: every test reads hundreds of these.
                with open(f"/proc/{pid}/task/{thread}/children", "rb", 0) as children:
                    listed = children.read()
                for child in map(int, listed.split()):
                    found |= {child} | listed_below(child)
    return found


def native_threads() -> dict[int, str]:
    """All threads of this process, Python's and others', by kernel id."""
    names = {}
    for thread_id in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):
            names[int(thread_id)] = Path(f"/proc/self/task/{thread_id}/comm").read_text().strip()
    python = {t.native_id: f"threading.Thread {t.name}" for t in threading.enumerate()}
    return names | {key: name for key, name in python.items() if key in names}  # type: ignore[misc]


def descriptors() -> dict[int, str]:
    """Open file descriptors and what they refer to."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return {fd: to for fd, to in found.items() if not to.startswith(f"/proc/{os.getpid()}/fd")}


def own_shared_memory() -> None:
    """Give this process and all that it starts a /dev/shm of their own, where that is allowed."""
    global _shared_memory_is_ours
    libc = ctypes.CDLL(None)
    _shared_memory_is_ours = (
        libc.unshare(CLONE_NEWNS) == 0
        and libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777") == 0
    )


def shared_memory() -> set[str]:
    """Names in /dev/shm: all if it is this session's own, else those that our processes hold.

    Other programs make and remove names there at any time.
    """
    names = set(os.listdir("/dev/shm"))
    if _shared_memory_is_ours or not names:
        return names
    held = "".join(map(maps_and_files, {os.getpid(), *descendants()}))
    return {name for name in names if f"/dev/shm/{name}" in held}


def maps_and_files(pid: int) -> str:
    """What a process has mapped and open, as /proc writes it."""
    parts = []
    with suppress(OSError):
        parts.append(Path(f"/proc/{pid}/maps").read_text())
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                parts.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return "\n".join(parts)


def pooled(name: str) -> bool:
    """Whether a native thread may belong to a library's pool that nobody can end."""
    ours = name.startswith(("sdp", "threading.Thread"))
    return not ours and any(library in sys.modules for library in POOLED)


def leaks(before: Snapshot, now: Snapshot) -> dict[str, list[str]]:
    """What `now` holds beyond `before`, by kind."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    found["processes"] = [
        f"process {pid}: {text}"
        for pid, text in now.processes.items()
        if pid not in before.processes
    ]
    found["threads"] = [
        f"thread {tid}: {name}"
        for tid, name in now.threads.items()
        if tid not in before.threads and not pooled(name)
    ]
    found["fds"] = [
        f"fd {fd} -> {to}"
        for fd, to in now.fds.items()
        if before.fds.get(fd) != to and to not in KEPT_FDS
    ]
    found["shm"] = [f"/dev/shm/{name}" for name in sorted(now.shm - before.shm)]
    names = before.env.keys() | now.env.keys()
    found["env"] = [
        f"{name}: {before.env.get(name)!r} -> {now.env.get(name)!r}"
        for name in sorted(names)
        if before.env.get(name) != now.env.get(name)
    ]
    return {kind: items for kind, items in found.items() if items}


def reap_orphans(but: Collection[int] = ()) -> None:
    """Collect zombies that came to us as a sub-reaper, but those for whose end somebody asks."""
    with suppress(ChildProcessError):
        if not os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
    for child in psutil.Process().children():
        with suppress(psutil.Error, ChildProcessError):
            if child.pid not in but and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def remaining(
    before: Snapshot, *, grace_s: float = GRACE_S, ignore: Collection[str] = ()
) -> list[str]:
    """What is still leaked after garbage collection and a grace for things that are ending."""
    end = time.monotonic() + grace_s
    while True:
        since = time.monotonic()
        found = leaks(before, Snapshot.take())
        items = [item for kind, texts in found.items() if kind not in ignore for item in texts]
        if not items or since > end:
            return items
        gc.collect()  # each time: what a thread that is ending still holds is not garbage yet
        time.sleep(0.02)


@contextmanager
def no_leaks(*, grace_s: float = GRACE_S, ignore: Collection[str] = ()) -> Iterator[None]:
    """Fail when the body leaves something behind."""
    before = Snapshot.take()
    yield
    items = remaining(before, grace_s=grace_s, ignore=ignore)
    assert not items, "left behind:\n  " + "\n  ".join(items)
