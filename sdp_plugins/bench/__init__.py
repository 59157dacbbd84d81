"""Benchmarks that compare smddp with other libraries, alternating in one run.

Run with `python -m sdp_plugins.bench`; nothing imports this package. `job` starts and commands
ranks, `libraries/` holds one file per library, `runner` alternates them, `table` and `plot` show
the result.
"""
