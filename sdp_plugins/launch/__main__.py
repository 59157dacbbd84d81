"""`python -m sdp_plugins.launch run ...` is the same as `sdp run ...`."""

from sdp_plugins.launch.cli import main

if __name__ == "__main__":
    main()
