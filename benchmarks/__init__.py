"""Benchmarks that compare smddp with other libraries, alternating in one run. Not in the package.

Run `python -m benchmarks` in a clone. `job` starts and commands ranks, `libraries/` holds one file
per library, `runner` alternates them, `table` and `plot` show the result. `testbed/` emulates
several nodes on one machine, for `nodes`, `scaling` and the tests; `predict/` simulates larger
clusters.
"""
