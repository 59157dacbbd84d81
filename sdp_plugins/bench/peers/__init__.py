"""The libraries that can be measured. Each has a file here with one class that fits `base.Peer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_HERE = "sdp_plugins.bench.peers"
# A ring in segments: what Open MPI leaves on the table at 25 MiB and more.
_OPENMPI_TUNING = {
    "OMPI_MCA_coll_tuned_priority": "100",
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "5",
    "OMPI_MCA_coll_tuned_allreduce_algorithm_segmentsize": "1048576",
}


@dataclass(frozen=True)
class PeerSpec:
    """How to run a peer.

    Attributes:
        name: As given to `--peers`.
        target: "module:class" of the Peer, imported only in its own ranks.
        title: What it is, for tables.
        options: Keyword arguments of the class.
        environment: Added to its ranks' environment.
        mpi: Whose mpiexec starts its ranks: "any", "mpich", "openmpi", or "" for none.
        reference: A yardstick of the machine, not a library.
        reduces: False where there is no bus bandwidth to speak of.
    """

    name: str
    target: str
    title: str
    options: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    mpi: str = ""
    reference: bool = False
    reduces: bool = True


_ALL = (
    PeerSpec("gloo", f"{_HERE}.c10d:Gloo", "torch.distributed, gloo"),
    PeerSpec("smddp", f"{_HERE}.smddp:Smddp", "torch.distributed, smddp, zero-copy"),
    PeerSpec(
        "smddp-unregistered",
        f"{_HERE}.smddp:Smddp",
        "torch.distributed, smddp, private memory",
        environment={"SDP_REGISTER": "0"},
    ),
    PeerSpec("core", f"{_HERE}.core:Core", "Group.all_reduce, memory of Group.allocate"),
    PeerSpec(
        "core-unregistered",
        f"{_HERE}.core:Core",
        "Group.all_reduce, NumPy array",
        options={"registered": False},
    ),
    PeerSpec(
        "core-traced",
        f"{_HERE}.core:Core",
        "Group.all_reduce, memory of Group.allocate, recorded",
        options={"traced": True},
    ),
    PeerSpec(
        "core-unrecorded",
        f"{_HERE}.core:Core",
        "Group.all_reduce, memory of Group.allocate, no flight recorder",
        options={"recorded": False},
    ),
    PeerSpec(
        "smddp-gloo",
        f"{_HERE}.smddp:Smddp",
        "torch.distributed, smddp, gloo between nodes",
        environment={"SDP_INTERNODE": "gloo"},
    ),
    PeerSpec(
        "smddp-mpich",
        f"{_HERE}.smddp:Smddp",
        "torch.distributed, smddp, MPICH between nodes",
        mpi="mpich",
    ),
    PeerSpec(
        "smddp-openmpi",
        f"{_HERE}.smddp:Smddp",
        "torch.distributed, smddp, Open MPI between nodes",
        mpi="openmpi",
    ),
    PeerSpec("mpi", f"{_HERE}.mpi:Mpi", "mpi4py, first MPI found", mpi="any"),
    PeerSpec("mpich", f"{_HERE}.mpi:Mpi", "mpi4py, MPICH", mpi="mpich"),
    PeerSpec("openmpi", f"{_HERE}.mpi:Mpi", "mpi4py, Open MPI", mpi="openmpi"),
    PeerSpec(
        "openmpi-tuned",
        f"{_HERE}.mpi:Mpi",
        "mpi4py, Open MPI, segmented ring",
        environment=_OPENMPI_TUNING,
        mpi="openmpi",
    ),
    PeerSpec(
        "memcpy",
        f"{_HERE}.memcpy:Memcpy",
        "each rank copies its buffer",
        reference=True,
        reduces=False,
    ),
    PeerSpec("floor", f"{_HERE}.floor:Floor", "zero-copy floor in NumPy", reference=True),
)
PEERS = {spec.name: spec for spec in _ALL}


def select(names: list[str], *, registered: bool = True) -> list[PeerSpec]:
    """The named peers; with `registered` off, smddp and core take private memory.

    Raises:
        ValueError: There is no such peer.
    """
    if not registered:
        names = [f"{n}-unregistered" if n in ("smddp", "core") else n for n in names]
    for name in names:
        if name not in PEERS:
            raise ValueError(f"unknown peer {name!r}; there are {', '.join(PEERS)}")
    return [PEERS[name] for name in dict.fromkeys(names)]
