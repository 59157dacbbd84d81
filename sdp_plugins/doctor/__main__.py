"""The command."""

import os
import signal
import sys

# A module in the current folder must not hide what this command imports: it looks for such modules.
if sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from sdp_plugins.doctor.cli import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ends sdp run
    sys.exit(main(sys.argv[1:]))
