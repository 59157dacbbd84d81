"""The libraries that can be measured: one file each, with an implementation of `base.Library`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_HERE = "benchmarks.libraries"
# A segmented ring, which Open MPI does not select by itself at 25 MiB and more.
_OPENMPI_TUNING = {
    "OMPI_MCA_coll_tuned_priority": "100",
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "5",
    "OMPI_MCA_coll_tuned_allreduce_algorithm_segmentsize": "1048576",
}


@dataclass(frozen=True)
class LibrarySpec:
    """How to run a library.

    Attributes:
        name: The name in `--libraries`.
        target: "module:class" of the Library, imported only in its own ranks.
        title: The description in tables.
        options: Keyword arguments of the class.
        environment: Variables added to its ranks' environment.
        mpi: Whose mpiexec starts its ranks: "any", "mpich", "openmpi", or "" for none.
        reference: Whether this is a reference of the machine and no library.
        reduces: Whether a bus bandwidth is meaningful.
        rounding: By what fraction a call may change a sum of the benchmark's values.
    """

    name: str
    target: str
    title: str
    options: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    mpi: str = ""
    reference: bool = False
    reduces: bool = True
    rounding: float = 0.0


_ALL = (
    LibrarySpec("gloo", f"{_HERE}.c10d:Gloo", "torch.distributed, gloo"),
    LibrarySpec("smddp", f"{_HERE}.smddp:Smddp", "torch.distributed, smddp, zero-copy"),
    LibrarySpec(
        "smddp-unregistered",
        f"{_HERE}.smddp:Smddp",
        "torch.distributed, smddp, private memory",
        environment={"SDP_REGISTER": "0"},
    ),
    LibrarySpec("core", f"{_HERE}.core:Core", "Group.all_reduce, memory of Group.allocate"),
    LibrarySpec(
        "core-unregistered",
        f"{_HERE}.core:Core",
        "Group.all_reduce, NumPy array",
        options={"registered": False},
    ),
    LibrarySpec(
        "core-traced",
        f"{_HERE}.core:Core",
        "Group.all_reduce, memory of Group.allocate, recorded",
        options={"traced": True},
    ),
    LibrarySpec(
        "core-unrecorded",
        f"{_HERE}.core:Core",
        "Group.all_reduce, memory of Group.allocate, no flight recorder",
        options={"recorded": False},
    ),
    LibrarySpec(
        "smddp-gloo",
        f"{_HERE}.smddp:Smddp",
        "torch.distributed, smddp, gloo between nodes",
        environment={"SDP_INTERNODE": "gloo"},
    ),
    LibrarySpec(
        "smddp-mpich",
        f"{_HERE}.smddp:Smddp",
        "torch.distributed, smddp, MPICH between nodes",
        mpi="mpich",
    ),
    LibrarySpec(
        "smddp-openmpi",
        f"{_HERE}.smddp:Smddp",
        "torch.distributed, smddp, Open MPI between nodes",
        mpi="openmpi",
    ),
    *(
        LibrarySpec(
            f"smddp-{network}-{wire}",
            f"{_HERE}.smddp:Smddp",
            f"torch.distributed, smddp, {wire} over {network} between nodes",
            environment={"SDP_INTERNODE": internode, "SDP_WIRE_DTYPE": wire},
            mpi=mpi,
            rounding=rounding,
        )
        for network, internode, mpi in (("gloo", "gloo", ""), ("mpich", "mpi", "mpich"))
        for wire, rounding in (("bf16", 2**-7), ("int8", 2**-4), ("fp8", 2**-3))
    ),
    LibrarySpec("mpi", f"{_HERE}.mpi:Mpi", "mpi4py, first MPI found", mpi="any"),
    LibrarySpec("mpich", f"{_HERE}.mpi:Mpi", "mpi4py, MPICH", mpi="mpich"),
    LibrarySpec("openmpi", f"{_HERE}.mpi:Mpi", "mpi4py, Open MPI", mpi="openmpi"),
    LibrarySpec(
        "openmpi-tuned",
        f"{_HERE}.mpi:Mpi",
        "mpi4py, Open MPI, segmented ring",
        environment=_OPENMPI_TUNING,
        mpi="openmpi",
    ),
    LibrarySpec(
        "memcpy",
        f"{_HERE}.memcpy:Memcpy",
        "each rank copies its buffer",
        reference=True,
        reduces=False,
    ),
    LibrarySpec(
        "lower_bound",
        f"{_HERE}.lower_bound:LowerBound",
        "zero-copy lower bound in NumPy",
        reference=True,
    ),
)
LIBRARIES = {spec.name: spec for spec in _ALL}


def select(names: list[str], *, registered: bool = True) -> list[LibrarySpec]:
    """Return the named libraries; with `registered` off, smddp and core use private memory.

    Raises:
        ValueError: There is no library of that name.
    """
    names = ["lower_bound" if name == "floor" else name for name in names]  # its former name
    if not registered:
        names = [f"{n}-unregistered" if n in ("smddp", "core") else n for n in names]
    for name in names:
        if name not in LIBRARIES:
            raise ValueError(f"unknown library {name!r}; there are {', '.join(LIBRARIES)}")
    return [LIBRARIES[name] for name in dict.fromkeys(names)]
