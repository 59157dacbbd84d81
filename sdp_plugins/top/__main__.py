"""Runs `sdp top` as a program of its own."""

import sys

from sdp_plugins.core.program_start import begin_program

if __name__ == "__main__":
    begin_program()
    from sdp_plugins.top.cli import main

    sys.exit(main(sys.argv[1:]))
