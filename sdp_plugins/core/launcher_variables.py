"""The variables by which launchers give a process its place, their parsers and precedence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Environment = Mapping[str, str]

# Slurm numbers its special steps from the top of 32 bits (batch script, interactive, extern, ...).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


class Launcher(NamedTuple):
    """Names of a launcher's variables; of several names, the first that is set counts.

    Attributes:
        source: Name of the launcher.
        rank: Names of the rank; the first of them is how the launcher's presence is recognised.
        size: Names of the world size.
        local_rank: Names of the rank within the node.
        local_size: Names of the number of ranks on the node.
        node_rank: Names of the index of the node.
    """

    source: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()

    def read(self, env: Environment) -> Placement:
        """Read the variables of this launcher.

        Raises:
            ValueError: A variable is not a whole number.
        """
        local_size = read_integer(env, self.local_size)
        node_rank = read_integer(env, self.node_rank)
        if self is SLURM and local_size is None:
            local_size = _slurm_tasks_on_node(env, node_rank)
        return Placement(
            rank=read_integer(env, self.rank),
            size=read_integer(env, self.size),
            local_rank=read_integer(env, self.local_rank),
            local_size=local_size,
            node_rank=node_rank,
        )


class Placement(NamedTuple):
    """The place according to one launcher; None for values that it does not set."""

    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None

    @property
    def empty(self) -> bool:
        """Whether neither rank nor world size is given."""
        return self.rank is None and self.size is None

    @property
    def complete(self) -> bool:
        """Whether rank and world size are both given."""
        return self.rank is not None and self.size is not None

    def contradicts(self, other: Placement) -> bool:
        """Whether both give a rank, or both a world size, and these differ."""
        pairs = ((self.rank, other.rank), (self.size, other.size))
        return any(a is not None and b is not None and a != b for a, b in pairs)


# torchrun, `sdp run`, and whoever sets these variables by hand.
ENVIRONMENT = Launcher(
    "environment",
    rank=("RANK",),
    size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_size=("LOCAL_WORLD_SIZE",),
    node_rank=("GROUP_RANK", "NODE_RANK"),
)
# OMPI_COMM_WORLD_NODE_RANK is no node's index: it counts the ranks of all jobs on one node.
OPEN_MPI = Launcher(
    "openmpi",
    rank=("OMPI_COMM_WORLD_RANK",),
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
# MPICH and Intel MPI set the MPI_ names, Cray's PMI the PMI_LOCAL_ ones.
HYDRA = Launcher(
    "hydra",
    rank=("PMI_RANK",),
    size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
SLURM = Launcher(
    "slurm",
    rank=("SLURM_PROCID",),
    size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    local_rank=("SLURM_LOCALID",),
    node_rank=("SLURM_NODEID",),
)
# PMIx has no variable for the world size: the user has to add WORLD_SIZE.
PMIX = Launcher("pmix", rank=("PMIX_RANK",), size=("WORLD_SIZE",))


def slurm_step(env: Environment) -> str | None:
    """Return ``JOB.STEP`` if this process was started by srun, else None.

    A batch script and an salloc shell run once, but see SLURM_PROCID=0 and the SLURM_NTASKS of the
    whole allocation; only a numbered step starts one process per task.
    """
    step = first_set(env, ("SLURM_STEP_ID", "SLURM_STEPID"))
    if step is None or "SLURM_PROCID" not in env:
        return None
    text = env[step].strip()
    if not text.isdecimal() or int(text) >= _FIRST_SPECIAL_STEP:
        return None
    return f"{env.get('SLURM_JOB_ID') or env.get('SLURM_JOBID', '')}.{text}"


def first_set(env: Environment, names: tuple[str, ...]) -> str | None:
    """Return the first of the names that has a value; an empty value counts as unset."""
    return next((name for name in names if env.get(name, "").strip()), None)


def read_integer(env: Environment, names: tuple[str, ...]) -> int | None:
    """Return the value of the first name that is set, None if none is.

    Raises:
        ValueError: It is not a whole number of zero or more.
    """
    name = first_set(env, names)
    if name is None:
        return None
    text = env[name].strip()
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(
            f"{name}={env[name]!r} is not a whole number of zero or more. "
            "Hint: the launcher sets it; unset it if it is stale."
        )
    return int(text)


def _slurm_tasks_on_node(env: Environment, node: int | None) -> int | None:
    """Read this node's entry of a list such as ``2(x3),1``; None if there is none."""
    name = first_set(env, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if name is None or node is None:
        return None
    for entry in env[name].split(","):
        tasks, _, repeat = entry.strip().rstrip(")").partition("(x")
        times = repeat or "1"
        if not (tasks.isdecimal() and times.isdecimal()):
            return None
        node -= int(times)
        if node < 0:
            return int(tasks)
    return None


def launchers_of_ranks(env: Environment) -> list[Launcher]:
    """Return the launchers other than RANK and WORLD_SIZE, strongest first."""
    if slurm_step(env) is None:
        return [OPEN_MPI, HYDRA, PMIX]
    slurm, hydra = SLURM.read(env), HYDRA.read(env)
    # srun sets PMI_ variables itself and they agree. hydra starts one proxy per node with srun; its
    # ranks inherit the proxy's Slurm variables, and only PMI's are theirs.
    if hydra.complete and hydra.contradicts(slurm):
        return [OPEN_MPI, HYDRA, PMIX]
    # The same holds for Open MPI's daemons.
    if OPEN_MPI.read(env).complete:
        return [OPEN_MPI, HYDRA, PMIX]
    return [SLURM, PMIX]
