"""What tests of several nodes need: MPIs that variables name, and nodes that this machine plays."""

from __future__ import annotations

import os

import pytest

from benchmarks.testbed import sandbox

MPI = os.environ.get("SDP_TEST_MPI", "")
"""Where an MPI and mpi4py are installed, apart from everything else."""
OPEN_MPI = os.environ.get("SDP_TEST_OPEN_MPI", "")
"""The same for Open MPI, which differs most from the others."""
MPIS = {"Open MPI": OPEN_MPI, "MPICH": MPI}
needs_mpi = pytest.mark.skipif(not MPI, reason="SDP_TEST_MPI names no MPI")
needs_open_mpi = pytest.mark.skipif(not OPEN_MPI, reason="SDP_TEST_OPEN_MPI names no MPI")
needs_nodes = pytest.mark.skipif(bool(reason := sandbox.reason_against()), reason=reason)
