"""Starts the ranks of a job on this machine: `sdp run -n 4 script.py`; no framework, no MPI."""
