"""A running job as it is seen from outside: `sdp top`, its page, and metrics for Prometheus.

Everything is read from the flight recorders in the ranks' shared memory; the ranks do nothing for
it. See docs/monitoring.md.
"""
