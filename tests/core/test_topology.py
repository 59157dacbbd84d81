"""The place in the job, for every launcher's variables and for the traps among them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sdp_plugins.core.process_identity import launcher_identity, process_identity
from sdp_plugins.core.topology import Topology
from tests.ranks import HANG_S

Env = dict[str, str]

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run7",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "2283274241",
}
OPEN_MPI_5 = {**OPEN_MPI_4, "PMIX_NAMESPACE": "prterun-host-77@1"}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "6",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
CRAY = {"PMI_RANK": "6", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "2", "PMI_LOCAL_SIZE": "4"}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "99",
    "SLURM_JOBID": "99",
    "SLURM_NTASKS": "6",
    "SLURM_NPROCS": "6",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2(x3)",
}
SLURM_STEP = {
    **BATCH_SCRIPT,
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def without(env: Env, *names: str) -> Env:
    return {name: value for name, value in env.items() if name not in names}


def place(env: Env) -> tuple[object, ...]:
    return tuple(Topology.from_env(env, identify=lambda marker: f"<{marker}>"))


# rank, world_size, local_rank, local_size, node_rank, job_key, source
PLACES: dict[str, tuple[Env, tuple[object, ...]]] = {
    "torchrun": (TORCHRUN, (5, 8, 1, 4, 1, "env:run7:10.0.0.1:29500", "torchrun")),
    "job id": ({**TORCHRUN, "SDP_JOB_ID": " a "}, (5, 8, 1, 4, 1, "id:a", "torchrun")),
    "NODE_RANK": (
        {**without(TORCHRUN, "GROUP_RANK"), "NODE_RANK": "1"},
        (5, 8, 1, 4, 1, "env:run7:10.0.0.1:29500", "torchrun"),
    ),
    "by hand": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"},
        (1, 2, 1, 2, 0, "env:::1", "environment"),
    ),
    "by hand, with port": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        (1, 2, 1, 2, 0, "env::h:1", "environment"),
    ),
    "by hand, one local rank each": (
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "SDP_JOB_ID": "a",
        },
        (3, 4, 0, 1, 3, "id:a", "environment"),
    ),
    "only local size": (
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "SDP_JOB_ID": "a"},
        (5, 8, 1, 4, 1, "id:a", "environment"),
    ),
    "only local rank": (
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SDP_JOB_ID": "a"},
        (5, 8, 1, 4, 1, "id:a", "environment"),
    ),
    "only node rank": (
        {"RANK": "5", "WORLD_SIZE": "8", "NODE_RANK": "1", "SDP_JOB_ID": "a"},
        (5, 8, 5, 8, 1, "id:a", "environment"),
    ),
    "by hand, under PMIx": (
        {"RANK": "1", "WORLD_SIZE": "2", "PMIX_RANK": "1", "PMIX_NAMESPACE": "ns"},
        (1, 2, 1, 2, 0, "env::::ns", "environment"),
    ),
    "by hand, alone": (
        {"RANK": "0", "WORLD_SIZE": "1"},
        (0, 1, 0, 1, 0, f"single:{process_identity(os.getpid())}", "environment"),
    ),
    "empty is unset": (
        {"RANK": "", "WORLD_SIZE": " ", "PMI_RANK": "", "PMIX_RANK": ""},
        (0, 1, 0, 1, 0, f"single:{process_identity(os.getpid())}", "single"),
    ),
    "nothing": ({}, (0, 1, 0, 1, 0, f"single:{process_identity(os.getpid())}", "single")),
    "nothing but a job id": ({"SDP_JOB_ID": "x"}, (0, 1, 0, 1, 0, "id:x", "single")),
    "Open MPI 4": (OPEN_MPI_4, (3, 4, 1, 2, 1, "openmpi:2283274241", "openmpi")),
    "Open MPI 5": (OPEN_MPI_5, (3, 4, 1, 2, 1, "openmpi:prterun-host-77@1", "openmpi")),
    "Open MPI without PMIx's variables": (
        without(OPEN_MPI_4, "PMIX_NAMESPACE", "PMIX_RANK"),
        (3, 4, 1, 2, 1, "openmpi:<OMPI_COMM_WORLD_RANK>", "openmpi"),
    ),
    "Open MPI, ranks dealt out to nodes": (
        {**OPEN_MPI_4, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        (2, 4, 1, 2, 0, "openmpi:2283274241", "openmpi"),
    ),
    "MPICH": (MPICH, (1, 2, 1, 2, 0, "hydra:<PMI_RANK>", "hydra")),
    "Cray": (CRAY, (6, 8, 2, 4, 1, "hydra:<PMI_RANK>", "hydra")),
    "Slurm step": (SLURM_STEP, (3, 5, 1, 2, 1, "slurm:99.2", "slurm")),
    "Slurm step, last node": (
        {**SLURM_STEP, "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"},
        (4, 5, 0, 1, 2, "slurm:99.2", "slurm"),
    ),
    "old Slurm": (
        {
            "SLURM_JOBID": "7",
            "SLURM_STEPID": "0",
            "SLURM_PROCID": "1",
            "SLURM_NPROCS": "2",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "0",
        },
        (1, 2, 1, 2, 0, "slurm:7.0", "slurm"),
    ),
    "PMIx with a world size": (
        {"PMIX_RANK": "1", "WORLD_SIZE": "2", "PMIX_NAMESPACE": "ns"},
        (1, 2, 1, 2, 0, "pmix:ns", "pmix"),
    ),
    # Not ranks of anything
    "batch script": (BATCH_SCRIPT, place({})),
    "batch script with a step": ({**BATCH_SCRIPT, "SLURM_STEP_ID": "batch"}, place({})),
    "batch step as a number": ({**BATCH_SCRIPT, "SLURM_STEP_ID": "4294967291"}, place({})),
    "interactive step": ({**BATCH_SCRIPT, "SLURM_STEP_ID": "4294967290"}, place({})),
    "step without a task": (without(SLURM_STEP, "SLURM_PROCID"), place({})),
    # One launcher inside another
    "torchrun under mpirun": (
        {**OPEN_MPI_4, **TORCHRUN},
        (5, 8, 1, 4, 1, "env:run7:10.0.0.1:29500", "torchrun"),
    ),
    "torchrun under MPICH, junk around": (
        {**MPICH, **TORCHRUN, "PMIX_RANK": "junk", "OMPI_COMM_WORLD_SIZE": "junk"},
        (5, 8, 1, 4, 1, "env:run7:10.0.0.1:29500", "torchrun"),
    ),
    "torchrun under srun": (
        {**SLURM_STEP, **TORCHRUN},
        (5, 8, 1, 4, 1, "env:run7:10.0.0.1:29500", "torchrun"),
    ),
    "torchrun in a batch script": (
        {**BATCH_SCRIPT, **TORCHRUN},
        (5, 8, 1, 4, 1, "env:run7:10.0.0.1:29500", "torchrun"),
    ),
    "mpirun in a batch script": (
        {**BATCH_SCRIPT, **OPEN_MPI_4},
        (3, 4, 1, 2, 1, "openmpi:2283274241", "openmpi"),
    ),
    "mpirun whose daemon srun started": (
        {**SLURM_STEP, **OPEN_MPI_4},
        (3, 4, 1, 2, 1, "openmpi:2283274241", "openmpi"),
    ),
    "mpiexec whose proxy srun started": (
        {**SLURM_STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", **MPICH},
        (1, 2, 1, 2, 0, "hydra:<PMI_RANK>", "hydra"),
    ),
    "srun --mpi=pmi2": (
        {**SLURM_STEP, "PMI_RANK": "3", "PMI_SIZE": "5"},
        (3, 5, 1, 2, 1, "slurm:99.2", "slurm"),
    ),
    "srun --mpi=pmix": (
        {**SLURM_STEP, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.99.2"},
        (3, 5, 1, 2, 1, "slurm:99.2", "slurm"),
    ),
    "srun, size exported by the script": (
        {**SLURM_STEP, "WORLD_SIZE": "5", "MASTER_PORT": "1"},
        (3, 5, 1, 2, 1, "slurm:99.2", "slurm"),
    ),
    # Variables that a wrapper derives: its port is the same for all jobs, mpirun's name is not
    "derived from mpirun": (
        {
            **OPEN_MPI_4,
            "RANK": "3",
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "algo-1",
            "MASTER_PORT": "7777",
        },
        (3, 4, 3, 4, 0, "env::algo-1:7777:openmpi:2283274241", "environment"),
    ),
    "derived from srun": (
        {**SLURM_STEP, "RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "MASTER_PORT": "1"},
        (4, 5, 0, 4, 1, "env:::1:slurm:99.2", "environment"),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_place(name: str) -> None:
    env, expected = PLACES[name]
    assert place(env) == expected


REFUSED: dict[str, tuple[Env, str]] = {
    "no size": ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
    "no rank": ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
    "Open MPI, no size": ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
    "MPICH, no rank": ({"PMI_SIZE": "2"}, "PMI_RANK is not"),
    "PMIx, no size": ({"PMIX_RANK": "1"}, "PMIX_RANK is set but WORLD_SIZE is not"),
    "which job?": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        "RANK and WORLD_SIZE do not tell this job from others.*SDP_JOB_ID, or MASTER_PORT",
    ),
    "rank too high": ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2.*0 to 1"),
    "Slurm rank too high": (
        {**SLURM_STEP, "SLURM_PROCID": "5"},
        "SLURM_PROCID=5 with SLURM_STEP_NUM_TASKS=5",
    ),
    "no ranks": ({"RANK": "0", "WORLD_SIZE": "0"}, "at least one rank"),
    "negative": ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1' is not a whole number"),
    "fraction": ({"RANK": "0", "WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0' is not a whole number"),
    "text": ({**MPICH, "PMI_RANK": "one"}, "PMI_RANK='one' is not a whole number"),
    "other digits": ({"RANK": "٣", "WORLD_SIZE": "4"}, "RANK='٣' is not a whole number"),
    "local rank": ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4: .* 0 to 3"),
    "local rank, no local size": (
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"},
        "LOCAL_RANK=2: .* 0 to 1",
    ),
    "local size": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is not in 1 to 8"),
    "local size 0": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 is not in 1 to 8"),
    "a pod's variables around mpirun": (
        {**OPEN_MPI_4, "RANK": "0", "WORLD_SIZE": "1"},
        "RANK=0 WORLD_SIZE=1 and OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 contradict",
    ),
    "a pod's variables around mpiexec": (
        {**MPICH, "RANK": "0", "WORLD_SIZE": "2"},
        "RANK=0 WORLD_SIZE=2 and PMI_RANK=1 PMI_SIZE=2 contradict",
    ),
    "half of a job around srun": (
        {**SLURM_STEP, "WORLD_SIZE": "2"},
        "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=5 and WORLD_SIZE=2 contradict",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    env, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        place(env)


@pytest.mark.parametrize("env", [TORCHRUN, OPEN_MPI_5, MPICH, SLURM_STEP, OPEN_MPI_4])
def test_ranks_of_one_job_have_one_key(env: Env) -> None:
    ranks = {"RANK", "LOCAL_RANK", "GROUP_RANK", "PMI_RANK", "MPI_LOCALRANKID", "PMIX_RANK"}
    ranks |= {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK"}
    ranks |= {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"}
    first = {name: "0" if name in ranks else value for name, value in env.items()}
    assert place(first)[5] == place(env)[5]
    assert place(first)[0] == 0


def test_reads_this_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SDP_JOB_ID", raising=False)
    assert Topology.from_env() == Topology.from_env(TORCHRUN)


PRINT_LAUNCHER = (
    "from sdp_plugins.core.process_identity import launcher_identity as f; print(f('PMI_RANK'))"
)


TWO_SHELLS = ["sh", "-c", """sh -c '"$@"; exit $?' x "$@"; exit $?""", "x"]


@pytest.mark.parametrize("wrapper", [[], TWO_SHELLS], ids=["direct", "two shells"])
def test_launcher_is_found_behind_wrappers(wrapper: list[str]) -> None:
    """Shells that every rank has for itself are not what the ranks have in common."""
    command = [*wrapper, sys.executable, "-c", PRINT_LAUNCHER]
    found = {
        subprocess.run(
            command,
            env={**os.environ, "PMI_RANK": str(rank)},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=True,
        ).stdout.strip()
        for rank in range(2)
    }
    assert found == {process_identity(os.getpid())}


def test_identities_of_processes() -> None:
    assert process_identity(os.getpid()).startswith(f"{os.getpid()}@")
    assert process_identity(os.getpid()) != f"{os.getpid()}@0"
    assert process_identity(2**22 + 1).endswith("@0")
    assert launcher_identity("NO_SUCH_VARIABLE") == process_identity(os.getppid())
