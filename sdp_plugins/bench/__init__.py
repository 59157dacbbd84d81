"""Benchmarks that compare smddp with its peers, alternating in one run.

Run with `python -m sdp_plugins.bench`; nothing imports this package. `job` starts and commands
ranks, `peers/` holds one file per library, `runner` alternates them, `table` and `plot` show what
came out.
"""
