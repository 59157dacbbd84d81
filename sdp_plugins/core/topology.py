"""The place of this process in its job, according to its launcher."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from .environment import environment
from .launcher_variables import (
    ENVIRONMENT,
    HYDRA,
    OPEN_MPI,
    PMIX,
    SLURM,
    Environment,
    Launcher,
    Placement,
    first_set,
    launchers_of_ranks,
    slurm_step,
)
from .process_identity import launcher_identity, process_identity

# Open MPI 4 and 5, and PMIx itself, name each mpirun's job by a namespace.
_NAMESPACES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_REMEDY = "start all ranks with one launcher, or set RANK and WORLD_SIZE for every rank"


class Topology(NamedTuple):
    """The place of this process in its job.

    ``local_rank``, ``local_size`` and ``node_rank`` are the launcher's view, or a guess if it gives
    none (contiguous ranks per node). They do not determine which ranks share memory: that is found
    by trying.

    Attributes:
        rank: Rank in the job.
        world_size: Number of ranks.
        local_rank: Rank within the node.
        local_size: Number of ranks on the node.
        node_rank: Index of the node.
        job_key: Equal on all ranks of the job, different for other jobs on the host.
        source: Source of this information: ``torchrun``, ``environment`` (the same variables, set
            by another launcher or by hand), ``openmpi``, ``hydra``, ``slurm``, ``pmix`` or
            ``single``.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_rank: int
    job_key: str
    source: str

    @classmethod
    def from_env(
        cls,
        env: Environment | None = None,
        *,
        identify: Callable[[str], str] = launcher_identity,
    ) -> Topology:
        """Read the place from the variables of a launcher.

        In this order: RANK and WORLD_SIZE (torchrun, ``sdp run``), Open MPI, a Slurm step, hydra
        (MPICH, Intel MPI), PMIx. Without any of them, the job has one rank.

        Args:
            env: Variables to read; None reads the environment of this process.
            identify: Returns the identity of the process that started the ranks, given a variable
                that it sets for each; used if the variables alone do not distinguish jobs.

        Raises:
            ValueError: Variables are incomplete, contradict each other, are not numbers, or could
                be the same for another job on this host.
        """
        given = environment() if env is None else env
        found = _detect(given)
        if found is None:
            key = _chosen_key(given) or f"single:{process_identity(os.getpid())}"
            return cls(0, 1, 0, 1, 0, key, "single")
        launcher, place = found
        _check(launcher, place)
        local_rank, local_size, node_rank = _locate(place)
        run_id = first_set(given, ("TORCHELASTIC_RUN_ID",)) if launcher is ENVIRONMENT else None
        return cls(
            rank=_known(place.rank),
            world_size=_known(place.size),
            local_rank=local_rank,
            local_size=local_size,
            node_rank=node_rank,
            job_key=_chosen_key(given) or _job_key(launcher, place, given, identify),
            source="torchrun" if run_id else launcher.source,
        )


def place_in_job(env: Environment | None = None) -> Topology | None:
    """What the launcher says of this process; None: there is none, or it cannot be understood."""
    try:
        found = Topology.from_env(env)
    except ValueError:
        return None
    return None if found.source == "single" else found


def _detect(env: Environment) -> tuple[Launcher, Placement] | None:
    """Return the launcher to use; None if there is none."""
    halves: list[tuple[Launcher, Placement]] = []
    for launcher in _candidates(env):
        place = launcher.read(env)
        if place.complete:
            # The user may have set a part of a stronger launcher's variables; they must agree.
            for other, its in [*halves, *_rivals(launcher, env)]:
                if place.contradicts(its):
                    raise _contradiction(launcher, place, other, its)
            return launcher, place
        if not place.empty:
            halves.append((launcher, place))
    if halves:
        raise _incomplete(*halves[0])
    return None


def _candidates(env: Environment) -> list[Launcher]:
    """Return the launchers whose variables are relevant, strongest first."""
    if ENVIRONMENT.read(env).complete:
        return [ENVIRONMENT]
    return [ENVIRONMENT, *launchers_of_ranks(env)]


def _rivals(winner: Launcher, env: Environment) -> list[tuple[Launcher, Placement]]:
    """Return complete launchers beside RANK and WORLD_SIZE that must not contradict these.

    A launcher of local processes sets LOCAL_RANK. A container platform may set RANK for a whole
    pod, and every rank of an mpirun inside it would then use that number.
    """
    if winner is not ENVIRONMENT or first_set(env, winner.local_rank) is not None:
        return []
    read = ((launcher, launcher.read(env)) for launcher in (OPEN_MPI, HYDRA))
    return [(launcher, place) for launcher, place in read if place.complete]


def _incomplete(launcher: Launcher, place: Placement) -> ValueError:
    have, lack = launcher.rank[0], launcher.size[0]
    if place.rank is None:
        have, lack = lack, have
    return ValueError(f"{have} is set but {lack} is not. Hint: {_REMEDY}.")


def _contradiction(
    launcher: Launcher, place: Placement, other: Launcher, its: Placement
) -> ValueError:
    def say(who: Launcher, what: Placement) -> str:
        pairs = ((who.rank[0], what.rank), (who.size[0], what.size))
        return " ".join(f"{name}={value}" for name, value in pairs if value is not None)

    return ValueError(
        f"{say(launcher, place)} and {say(other, its)} contradict each other. "
        f"Hint: unset the stale ones; {_REMEDY}."
    )


def _check(launcher: Launcher, place: Placement) -> None:
    rank, size = _known(place.rank), _known(place.size)
    names = f"{launcher.rank[0]}={rank} with {launcher.size[0]}={size}"
    if size < 1:
        raise ValueError(f"{names}: a job has at least one rank. Hint: {_REMEDY}.")
    if rank >= size:
        raise ValueError(f"{names}: ranks go from 0 to {size - 1}. Hint: {_REMEDY}.")
    local_rank, local_size = place.local_rank, place.local_size
    if local_size is not None and not 1 <= local_size <= size:
        name = launcher.local_size[0] if launcher.local_size else "SLURM_TASKS_PER_NODE"
        raise ValueError(f"{name}={local_size} is not in 1 to {size}, the world size.")
    if local_rank is not None and local_rank >= (local_size or size):
        name = launcher.local_rank[0]
        raise ValueError(
            f"{name}={local_rank}: local ranks go from 0 to {(local_size or size) - 1}."
        )


def _locate(place: Placement) -> tuple[int, int, int]:
    """Return local rank, local size and node rank, guessed where not given."""
    rank, size = _known(place.rank), _known(place.size)
    local_rank, local_size, node_rank = place.local_rank, place.local_size, place.node_rank
    if local_rank is None:
        local_rank = rank % (local_size or size)
    if local_size is None:
        first = rank - local_rank  # of this node, if ranks are contiguous
        guess = (first // node_rank if node_rank else first) or size
        local_size = min(max(guess, local_rank + 1), size)
    if node_rank is None:
        contiguous = rank % local_size == local_rank
        node_rank = rank // local_size if contiguous else rank % -(-size // local_size)
    return local_rank, local_size, node_rank


def _chosen_key(env: Environment) -> str:
    chosen = env.get("SDP_JOB_ID", "").strip()
    return f"id:{chosen}" if chosen else ""


def _job_key(
    launcher: Launcher, place: Placement, env: Environment, identify: Callable[[str], str]
) -> str:
    if launcher is not ENVIRONMENT:
        return _launcher_key(launcher, env, identify)
    run, addr, port = (
        env.get(name, "").strip() for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    )
    key = f"env:{run}:{addr}:{port}"
    if run:
        return key
    # Variables that a script derived from a launcher's: every job may have the same port, so the
    # launcher's own ids join in. Sizes decide, which are equal on all ranks.
    for other in launchers_of_ranks(env):
        if other is not PMIX and other.read(env).size == place.size:
            return f"{key}:{_launcher_key(other, env, identify)}"
    if port:
        return key
    if (named := first_set(env, _NAMESPACES)) is not None:
        return f"{key}:{env[named].strip()}"
    if place.size == 1:
        return f"single:{process_identity(os.getpid())}"
    raise ValueError(
        f"{launcher.rank[0]} and {launcher.size[0]} do not tell this job from others on this "
        "host. Hint: set SDP_JOB_ID, or MASTER_PORT, to what only the ranks of this job have."
    )


def _launcher_key(launcher: Launcher, env: Environment, identify: Callable[[str], str]) -> str:
    if launcher is SLURM:
        return f"slurm:{slurm_step(env)}"
    named = first_set(env, _NAMESPACES)
    if launcher is not HYDRA and named is not None:
        return f"{launcher.source}:{env[named].strip()}"
    return f"{launcher.source}:{identify(launcher.rank[0])}"


def _known(value: int | None) -> int:
    assert value is not None
    return value
