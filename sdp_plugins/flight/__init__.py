"""The flight recorder: each rank's last operations, and which ranks wait for which others.

It is always on. The native core records operations in each rank's shared memory (csrc/flight.hpp);
this package reads them: of this process's groups when one fails or SIGUSR1 comes, and of other
processes by ``python -m sdp_plugins.flight``. See docs/debugging.md.
"""
