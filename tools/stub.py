"""Writes the stub of the native module, or compares it with the one that is checked in.

python tools/stub.py            write sdp_plugins/core/_native.pyi
python tools/stub.py --check    exit 1 and show the difference if it is out of date
"""

import argparse
import difflib
import importlib
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

MODULE = "sdp_plugins.core._native"
STUB = Path(__file__).resolve().parent.parent / "sdp_plugins" / "core" / "_native.pyi"


def generate() -> str:
    generator = StubGen(importlib.import_module(MODULE))
    generator.put(generator.module)
    return generator.get()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    wanted = generate()
    if not parser.parse_args().check:
        STUB.write_text(wanted)
        return 0
    present = STUB.read_text() if STUB.exists() else ""
    lines = difflib.unified_diff(
        present.splitlines(), wanted.splitlines(), "checked in", "generated", lineterm=""
    )
    difference = "\n".join(lines)
    if difference:
        print(f"{difference}\n{STUB.name} is out of date: run `make stub` and commit it")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
