"""Compiles native code of plug-ins at its first use.

The headers for a framework's operations differ between its versions, so this code is compiled where
the framework is installed, with the headers of ``core/include``, and cached. The core itself is
compiled when the package is built.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .config import Config
from .environment import environment

log = logging.getLogger("sdp_plugins.core")
INCLUDE = Path(__file__).with_name("include")
COMPILE_LIMIT_S = 600


class CompileError(RuntimeError):
    """Raised when a plug-in's native code cannot be compiled; the text has the reason."""


def build(source: Path, version: str, compiler: Sequence[str], linker: Sequence[str] = ()) -> Path:
    """Compile a source file to a shared library, or take it from the cache.

    Concurrent ranks wait for the first one. Only compiling needs a compiler, so that images can be
    prepared.

    Args:
        source: C++ that includes a header of ``core/include``; its own headers are in its folder or
            below.
        version: Version of the framework.
        compiler: Compiler flags.
        linker: Flags after the source.

    Returns:
        The library, whose name depends on all of these, the processor and the C library.

    Raises:
        CompileError: There is no compiler, or it failed, or ``SDP_NATIVE_OPS`` is 0.
    """
    config = Config.from_env()
    if not config.native_ops:
        raise CompileError("SDP_NATIVE_OPS is 0")
    headers = [*sorted(INCLUDE.rglob("*.h")), *sorted(source.parent.rglob("*.h"))]
    parts = [*(path.read_text() for path in (source, *headers)), version, *compiler, *linker]
    parts += [platform.machine(), *platform.libc_ver()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    library = cache_folder(config.cache, environment()) / f"{source.stem}-{digest}.so"
    options = ["-O3", "-fPIC", "-shared", f"-I{INCLUDE}", *compiler, str(source), *linker]
    try:
        if not library.exists():
            _compile_once([_compiler(), *options], library)
    except OSError as error:  # the cache is not writable
        raise CompileError(
            f"{source.name}: {error}. Hint: set SDP_CACHE to another folder"
        ) from None
    return library


def compile_ahead(package: str, compile_all: Callable[[], object]) -> int:
    """The command ``python -m package``: compile ahead of the first use; returns its exit status.

    `compile_all` may raise ``CompileError``.
    """
    argparse.ArgumentParser(
        prog=f"python -m {package}",
        description="Compile the all_reduce of this plug-in ahead of its first use, as for an "
        "image that has no compiler.",
        epilog="The library is kept in SDP_CACHE (default: ~/.cache/sdp_plugins); CXX names the "
        "compiler.",
    ).parse_args()
    signal.signal(signal.SIGTERM, _end)
    try:
        compile_all()
    except CompileError as error:
        print(f"all_reduce: not compiled: {error}")
        return 1
    print("all_reduce: compiled")
    return 0


def _end(number: int, frame: object) -> None:
    """End the compiler, of which `subprocess` may not know yet; the exit removes its folder."""
    with suppress(OSError):
        for child in Path("/proc/thread-self/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    sys.exit(128 + number)


def cache_folder(chosen: str | None, env: Mapping[str, str]) -> Path:
    """The folder for compiled operations: that of ``SDP_CACHE``, or the user's default."""
    if chosen:
        return Path(chosen)
    base = env.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sdp_plugins"


def compiler_name(env: Mapping[str, str]) -> str:
    """The compiler that is used, if it is there."""
    return env.get("CXX") or "g++"


def _compiler() -> str:
    wanted = compiler_name(environment())
    found = shutil.which(wanted)
    if found is None:
        raise CompileError(f"there is no compiler {wanted}. Hint: install g++, or set CXX")
    return found


def _compile_once(command: Sequence[str], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            log.warning(
                "compiling %s, once, which takes some seconds; kept in %s",
                library.stem,
                library.parent,
            )
            _compile(command, library)


def _compile(command: Sequence[str], library: Path) -> None:
    what = library.name.split("-")[0]
    prefix = f"{library.stem}-tmp"
    for left in library.parent.glob(f"{prefix}*"):  # of a killed process: this process has the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=library.parent) as folder:
        output = Path(folder) / library.name
        try:
            done = subprocess.run(
                [*command, "-o", str(output)],
                capture_output=True,
                text=True,
                timeout=COMPILE_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CompileError(f"{what}: not compiled in {COMPILE_LIMIT_S} s") from None
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "")
            raise CompileError(f"{what}: {first or done.stderr[-300:]}")
        os.replace(output, library)
