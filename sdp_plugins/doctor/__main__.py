"""The command."""

import os
import sys

# A module in the current folder must not hide what this command imports: it looks for such modules.
if sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from sdp_plugins.doctor.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
