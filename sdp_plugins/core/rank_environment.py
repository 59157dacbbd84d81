"""The variables that torch's and SMDDP's scripts read, for a rank that mpirun has started."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping

from .topology import Topology

SAGEMAKER_PORT = 7777  # the port of SageMaker's PyTorch toolkit
FIRST_PORT, PORTS = 10_000, 20_000  # below the kernel's ephemeral ports
HOST_NAME_LIBRARY = "gethostname.cpython"
RESOURCES = "/opt/ml/input/config/resourceconfig.json"


def rank_environment(
    topology: Topology, given: Mapping[str, str], resources: str | os.PathLike[str] = RESOURCES
) -> dict[str, str]:
    """`given`, plus those variables of torchrun and SMDDP that it lacks.

    SageMaker's toolkit preloads a library for gethostname() that crashes without the file
    `resources`, SageMaker's list of hosts: in that case the library is removed, and the port is
    derived from the job.
    """
    in_sagemaker = os.path.exists(resources)
    place = {
        "RANK": topology.rank,
        "WORLD_SIZE": topology.world_size,
        "LOCAL_RANK": topology.local_rank,
        "LOCAL_WORLD_SIZE": topology.local_size,
        "NODE_RANK": topology.node_rank,
        "GROUP_RANK": topology.node_rank,
        "SMDATAPARALLEL_WORLD_RANK": topology.rank,
        "SMDATAPARALLEL_WORLD_SIZE": topology.world_size,
        "SMDATAPARALLEL_LOCAL_RANK": topology.local_rank,
    }
    found = {name: str(value) for name, value in place.items()}
    if address := _address(topology, given):
        found["MASTER_ADDR"] = address
    # Derived from the job: the same on all ranks, and unlikely in other jobs.
    own_port = FIRST_PORT + zlib.crc32(topology.job_key.encode()) % PORTS
    port = SAGEMAKER_PORT if in_sagemaker else own_port
    found["MASTER_PORT"] = given.get("SM_MASTER_PORT", "") or str(port)
    found |= {name: value for name, value in given.items() if value or name not in found}
    preloaded = given.get("LD_PRELOAD", "")
    if HOST_NAME_LIBRARY in preloaded and not in_sagemaker:
        libraries = preloaded.replace(":", " ").split()
        kept = " ".join(library for library in libraries if HOST_NAME_LIBRARY not in library)
        found["LD_PRELOAD"] = kept
    return found


def misplaced(topology: Topology, given: Mapping[str, str]) -> str:
    """The warning if all ranks of a job with several hosts run on one host; empty otherwise.

    Open MPI 5 places ranks so under SageMaker's toolkit, and the job would use only a part of the
    machines that are paid for.
    """
    hosts = _hosts(given)
    several = "SMDATAPARALLEL_USE_HOMOGENEOUS" in given and len(hosts) > 1
    if not several or topology.local_size != topology.world_size or topology.world_size == 1:
        return ""
    return (
        f"all {topology.world_size} ranks run on one of the hosts {', '.join(hosts)}. Hint: Open "
        "MPI 5 places them so; give custom_mpi_options='--map-by slot:oversubscribe'."
    )


def _hosts(given: Mapping[str, str]) -> list[str]:
    """SageMaker's list of hosts."""
    if not given.get("SM_HOSTS"):
        return []
    import json  # not on SageMaker

    try:
        return [str(host) for host in json.loads(given["SM_HOSTS"])]
    except (ValueError, TypeError):
        return []


def _address(topology: Topology, given: Mapping[str, str]) -> str:
    """The address of rank 0's host; empty if unknown.

    mpirun does not tell where rank 0 runs, so outside of SageMaker a job on several nodes needs
    MASTER_ADDR for torch's env:// rendezvous.
    """
    for name in ("SMDATAPARALLEL_SERVER_ADDR", "SM_MASTER_ADDR"):
        if given.get(name):
            return given[name]
    if hosts := _hosts(given):
        return hosts[0]
    return "127.0.0.1" if topology.local_size == topology.world_size else ""
