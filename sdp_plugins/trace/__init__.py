"""Shows what the ranks of a job wait for that runs, hangs or has failed.

python -m sdp_plugins.trace [JOB]
"""
