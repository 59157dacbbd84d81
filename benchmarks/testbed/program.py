"""Runs a program on all ranks of a testbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.mpi import MpiInstall
from benchmarks.testbed import start
from benchmarks.testbed.network import Network

END_LIMIT_S = 5.0


def run(network: Network, ranks_per_node: int, line: Sequence[str], mpi: MpiInstall | None) -> int:
    """Run a command on all ranks: under mpirun if an MPI is given, else under torchrun.

    Returns:
        The exit status: the first that is not 0.
    """
    with tempfile.TemporaryDirectory(prefix="sdp-cluster-") as folder:
        env = {**os.environ, **start.environment(network)}
        if mpi:
            ranks = network.nodes * ranks_per_node
            lines = [start.by_mpirun(network, mpi, [list(line)] * ranks, folder)]
            env |= mpi.environment()
        else:
            lines = start.by_torchrun(network, ranks_per_node, line)
        return _wait([subprocess.Popen(line, env=env) for line in lines])


def _wait(launchers: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all; after a failure, give the others some time to report their errors."""
    status, deadline = 0, None
    try:
        while None in [launcher.poll() for launcher in launchers]:  # polls all of them
            failed = [launcher.returncode for launcher in launchers if launcher.returncode]
            if failed and deadline is None:
                status, deadline = failed[0], time.monotonic() + END_LIMIT_S
            if deadline is not None and time.monotonic() > deadline:
                print("some ranks did not end and are killed", file=sys.stderr)
                break
            time.sleep(0.02)
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGKILL)
            launcher.wait()
    return status or next((code for code in (p.returncode for p in launchers) if code), 0)
