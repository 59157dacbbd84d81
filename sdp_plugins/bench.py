"""`python -m sdp_plugins.bench`, deprecated: `python -m benchmarks` in a clone replaces it."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    clone = Path(__file__).resolve().parents[1]  # if the install is editable
    if not (clone / "benchmarks" / "libraries").is_dir():
        sys.exit("error: the benchmarks have moved. Hint: run `python -m benchmarks` in a clone")
    print("warning: sdp_plugins.bench is now `python -m benchmarks`", file=sys.stderr)
    sys.path.insert(0, str(clone))
    runpy.run_module("benchmarks", run_name="__main__")
