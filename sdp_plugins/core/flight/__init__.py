"""The flight recorder: each rank's last operations, and who waits for whom in them.

It is always on: the native core writes into each rank's shared memory, see csrc/flight.hpp. Here it
is read: of this process's groups when one fails or SIGUSR1 comes, and of other processes by
``python -m sdp_plugins.trace``. See docs/trace.md.
"""
