"""Runs `sdp top` as a program of its own."""

import signal
import sys

from sdp_plugins.top.cli import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: restores the terminal
    sys.exit(main(sys.argv[1:]))
