"""Check that Python finds the packages of requirement files in exactly those versions.

tests/keras/versions/ are put before an environment's packages; one that is not would go unnoticed.
"""

import sys
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    lines = [line for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    wrong = []
    for name, wanted in (line.split("==") for line in lines if "==" in line):
        found = version(name)
        print(f"{name} {found}")
        if found != wanted:
            wrong.append(f"{name} is {found}, not {wanted}")
    sys.exit("; ".join(wrong) or 0)


if __name__ == "__main__":
    main()
