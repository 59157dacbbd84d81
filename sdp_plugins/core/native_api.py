"""What native code of a plug-in needs: the core's functions, and a compiler at its first use.

Frameworks differ from version to version in what their operations are compiled against, so such
code is compiled where the framework is installed, against ``core/include/sdp_api.h``, and kept in a
cache. The core itself is none of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from . import _native
from .config import Config, environment
from .group import Group
from .internode.spanning_group import SpanningGroup

INCLUDE = Path(__file__).with_name("include")
COMPILE_LIMIT_S = 600

_endpoints: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()


class CompileError(RuntimeError):
    """A plug-in's native code could not be compiled here; the text says why."""


def api() -> int:
    """Address of an ``SdpApi``."""
    return _native.api()


def endpoint(group: Group) -> int:
    """Address of a group's ``SdpEndpoint``; the same one each time."""
    if group not in _endpoints:
        native = group._native
        if isinstance(native, SpanningGroup):
            _endpoints[group] = _native.make_endpoint(_weak_submit(native))
        else:
            _endpoints[group] = native.endpoint()
    return _endpoints[group]


def everywhere(group: Group, available: bool) -> bool:
    """Whether something is available on all ranks, which must do alike."""
    everyone_has_it = np.array([available], np.uint8)
    group.all_reduce(everyone_has_it, "min")
    return bool(everyone_has_it[0])


def agreed_endpoint(group: Group, available: bool) -> int | None:
    """A group's endpoint if native operations are available on all ranks."""
    return endpoint(group) if everywhere(group, available) else None


def _weak_submit(native: SpanningGroup) -> object:
    group = weakref.ref(native)

    def submit(
        op: _native.Op,
        dtype: _native.DType,
        reduce_op: _native.ReduceOp,
        sends: Sequence[tuple[int, int]],
        recvs: Sequence[tuple[int, int]],
        timeout_s: float,
        layout: int,
    ) -> _native.Work:
        held = group()
        if held is None:
            raise RuntimeError("the group is closed. Hint: make a new one.")
        return held.submit(op, dtype, reduce_op, 1.0, -1, sends, recvs, timeout_s, layout)

    return submit


def build(source: Path, flags: Sequence[str]) -> Path:
    """Compile a source file to a shared library, or take it from the cache.

    Ranks that come at the same time wait for the first of them.

    Args:
        source: C++ that includes ``sdp_api.h``; its own headers stand beside it, or below.
        flags: For the compiler, of which the last may be for the linker.

    Returns:
        The library. Its name tells source, headers, flags and compiler apart.

    Raises:
        CompileError: There is no compiler, or it failed, or ``SDP_NATIVE_OPS`` is 0.
    """
    config = Config.from_env()
    if not config.native_ops:
        raise CompileError("SDP_NATIVE_OPS is 0")
    compiler = _compiler()
    command = [compiler, "-O3", "-fPIC", "-shared", f"-I{INCLUDE}", *flags]
    library = _cache(config) / f"{source.stem}-{_fingerprint(source, command)}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(command, source, library)
    return library


def _compiler() -> str:
    wanted = environment().get("CXX") or "g++"
    found = shutil.which(wanted)
    if found is None:
        raise CompileError(f"there is no compiler {wanted}. Hint: install g++, or set CXX")
    return found


def _cache(config: Config) -> Path:
    if config.cache is not None:
        return Path(config.cache)
    base = environment().get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sdp_plugins"


def _fingerprint(source: Path, command: Sequence[str]) -> str:
    version = subprocess.run(
        [command[0], "--version"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    headers = [*sorted(INCLUDE.rglob("*.h")), *sorted(source.parent.rglob("*.h"))]
    parts = (*(path.read_text() for path in (source, *headers)), version, *command)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _compile(command: Sequence[str], source: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / library.name
        cut = next((i for i, flag in enumerate(command) if flag.startswith(("-L", "-l"))), None)
        full = (
            [*command[:cut], str(source), "-o", str(output), *command[cut:]]
            if cut
            else [*command, str(source), "-o", str(output)]
        )
        try:
            done = subprocess.run(
                full, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise CompileError(f"{source.name}: not compiled in {COMPILE_LIMIT_S} s") from None
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "")
            raise CompileError(f"{source.name}: {first or done.stderr[-300:]}")
        os.replace(output, library)
