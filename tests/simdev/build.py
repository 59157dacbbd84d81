"""Compiles the simulated device once for each content of its sources and version of torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
# Compiled in one piece each: torch's headers take most of the time.
PIECES = (
    ["ops", "copies", "views", "kernel", "fallback"],
    ["guard", "hooks", "runtime", "thread_state", "memory", "host", "capi"],
)
FLAGS = (
    *("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-interference-size"),
    "-DAT_PER_OPERATOR_HEADERS",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
)


def library() -> Path:
    """The compiled library, compiled now if it has not been.

    Raises:
        RuntimeError: if the compiler fails.
    """
    folder = Path(tempfile.gettempdir()) / f"simdev-{os.getuid()}-{digest()}"
    made = folder / "libsimdev.so"
    if made.exists():
        return made
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others wait for the one that compiles
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                compile_in(Path(scratch)).rename(made)
    return made


def digest() -> str:
    """Differs wherever the library would."""
    found = hashlib.sha256(f"{torch.__version__} {torch.version.git_version} {FLAGS}".encode())
    for path in (Path(__file__), *sorted(SOURCES.iterdir())):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def compile_in(folder: Path) -> Path:
    """Compile all pieces at once, and link them."""
    root = Path(torch.__file__).parent
    compiler = os.environ.get("CXX", "g++")
    objects, running = [], []
    for i, names in enumerate(PIECES):
        piece = folder / f"piece{i}.cpp"
        piece.write_text("".join(f'#include "{SOURCES / name}.cpp"\n' for name in names))
        objects.append(str(piece.with_suffix(".o")))
        includes = [f"-I{SOURCES}", f"-isystem{root / 'include'}"]
        command = [compiler, *FLAGS, *includes, "-c", str(piece), "-o", objects[-1]]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate()[1] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError("the simulated device does not compile:\n" + "\n".join(errors))
    made = folder / "libsimdev.so"
    libraries = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    link = [
        compiler,
        "-shared",
        "-Wl,--no-undefined",
        "-o",
        str(made),
        *objects,
        *libraries,
        "-pthread",
    ]
    done = subprocess.run(link, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError("the simulated device does not link:\n" + done.stderr)
    return made
