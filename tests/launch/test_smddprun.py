"""`smddprun`: in a rank of mpirun, as SageMaker's toolkit starts it, and by hand."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sdp_plugins.core.rank_environment import rank_environment
from sdp_plugins.core.topology import Topology
from tests.ranks import HANG_S

SMDDPRUN = [sys.executable, "-m", "sdp_plugins.launch.smddprun"]
SHOW = [
    sys.executable,
    "-c",
    "import json, os, sys; print(json.dumps([os.getpid(), sys.argv[1:], dict(os.environ), "
    "[*os.sched_getaffinity(0)]]))",
]


def open_mpi(rank: int = 3, size: int = 4, local: int = 1, each: int = 2) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": each}
    found = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
    return found | {"PMIX_NAMESPACE": "prterun-a-1@1"}


def completed(given: Mapping[str, str], **options: Any) -> dict[str, str]:
    return rank_environment(Topology.from_env(given), given, **options)


def clean(**added: str) -> dict[str, str]:
    """An environment that no launcher has touched."""
    return {"PATH": os.environ["PATH"], "HOME": "/root", **added}


def start(*args: str, env: Mapping[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
    line = [*SMDDPRUN, *args]
    return subprocess.run(
        line, env=env, capture_output=True, text=True, timeout=HANG_S, check=False, **options
    )


# ---- the environment ----------------------------------------------------------------------------


def test_a_rank_gets_torchs_and_smddps_variables() -> None:
    found = completed(open_mpi())
    assert {name: found[name] for name in found if not name.startswith(("OMPI", "PMIX"))} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "SMDATAPARALLEL_WORLD_RANK": "3",
        "SMDATAPARALLEL_WORLD_SIZE": "4",
        "SMDATAPARALLEL_LOCAL_RANK": "1",
        "MASTER_PORT": found["MASTER_PORT"],
    }


def test_nothing_that_is_set_is_overridden() -> None:
    given = open_mpi() | {
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "NODE_RANK": "7",
        "LOCAL_RANK": "",
    }
    found = completed(given)
    assert [found[name] for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK")] == [
        *"a17",
        "1",
    ]


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({}, None),  # mpirun does not tell where rank 0 is
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "algo-1"),
        ({"SM_HOSTS": "not a list"}, None),
        ({"SM_HOSTS": '["algo-1"]', "SM_MASTER_ADDR": "algo-3"}, "algo-3"),
        ({"SM_MASTER_ADDR": "algo-3", "SMDATAPARALLEL_SERVER_ADDR": "algo-4"}, "algo-4"),
    ],
)
def test_the_address_of_rank_0(given: dict[str, str], address: str | None) -> None:
    assert completed(open_mpi() | given).get("MASTER_ADDR") == address


def test_one_node_meets_on_the_loopback() -> None:
    assert completed(open_mpi(each=4))["MASTER_ADDR"] == "127.0.0.1"


def test_the_port_is_sagemakers_or_the_jobs_own(tmp_path: Path) -> None:
    port = completed(open_mpi())["MASTER_PORT"]
    assert port == completed(open_mpi(rank=0, local=0))["MASTER_PORT"]
    assert 10_000 <= int(port) < 30_000
    assert port != completed(open_mpi() | {"PMIX_NAMESPACE": "prterun-a-2@1"})["MASTER_PORT"]
    hosts = {"SM_HOSTS": '["algo-1"]', "SMDATAPARALLEL_USE_HOMOGENEOUS": "1"}
    assert completed(open_mpi() | hosts, resources=tmp_path)["MASTER_PORT"] == "7777"
    # Elsewhere two such jobs may be on one machine.
    assert completed(open_mpi() | hosts, resources=tmp_path / "none")["MASTER_PORT"] == port
    assert completed(open_mpi() | {"SM_MASTER_PORT": "7"})["MASTER_PORT"] == "7"


def test_a_preloaded_library_that_would_crash_is_dropped(tmp_path: Path) -> None:
    given = open_mpi() | {"LD_PRELOAD": "/a/libx.so:/b/gethostname.cpython-311-x86_64-linux-gnu.so"}
    assert completed(given, resources=tmp_path / "none.json")["LD_PRELOAD"] == "/a/libx.so"
    assert completed(given, resources=tmp_path)["LD_PRELOAD"] == given["LD_PRELOAD"]


def test_all_ranks_on_one_of_two_hosts() -> None:
    """Where Open MPI 5 puts them for SageMaker's toolkit: rank 0 says so, and goes on."""
    job = {"SM_HOSTS": '["algo-1", "algo-2"]', "SMDATAPARALLEL_USE_HOMOGENEOUS": "1"}
    for rank, each, said in ((0, 4, True), (1, 4, False), (0, 2, False)):
        env = clean(**open_mpi(rank, 4, rank, each), **job)
        done = start("true", env=env)
        assert done.returncode == 0
        assert ("all 4 ranks run on one of the hosts algo-1, algo-2" in done.stderr) == said
        assert ("--map-by slot:oversubscribe" in done.stderr) == said


# ---- in a rank ----------------------------------------------------------------------------------


def test_it_becomes_the_command_and_leaves_its_arguments_alone() -> None:
    arguments = ["a b", "", "$HOME", "-n", "3", "--", "*", "-x", "--help"]
    line = [*SMDDPRUN, "-x", "ADDED=a=b", *SHOW, *arguments]
    with subprocess.Popen(
        line, env=clean() | open_mpi(), stdout=subprocess.PIPE, text=True
    ) as rank:
        output, _ = rank.communicate(timeout=HANG_S)
    pid, found, environment, _ = json.loads(output)
    assert (pid, found) == (rank.pid, arguments)
    assert (environment["RANK"], environment["ADDED"]) == ("3", "a=b")


def test_it_starts_with_every_rank_and_loads_little() -> None:
    heavy = {"argparse", "dataclasses", "inspect", "json", "pathlib", "subprocess", "numpy"}
    code = "import sys; before = {*sys.modules}; import sdp_plugins.launch.smddprun"
    code += "; from sdp_plugins.core.topology import Topology; Topology.from_env()"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*({{*sys.modules}} - before))"],
        env=clean() | open_mpi(),
        **{"capture_output": True, "text": True, "timeout": HANG_S, "check": True},
    )
    assert "sdp_plugins.launch.smddprun" in done.stdout.split()
    assert not heavy & {*done.stdout.split()}


def test_exit_codes_and_signals_are_the_commands() -> None:
    env = clean() | open_mpi()
    assert start("sh", "-c", "exit 7", env=env).returncode == 7
    assert start("sh", "-c", "kill -9 $$", env=env).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ([], 2, "COMMAND is missing"),
        (["no-such-program"], 127, "cannot start 'no-such-program': No such file or directory"),
        (["/etc"], 126, "cannot start '/etc': Permission denied"),
        (["-n", "0", "true"], 2, "a job has at least one rank"),
        (["-n", "3", "true"], 2, "this is rank 3 of 4 (openmpi), but -n asks for 3"),
        (["-x", "=a", "true"], 2, "-x =a: no name before the ="),
        (["-x", "NOT_SET", "true"], 2, "-x NOT_SET: it is not set"),
    ],
)
def test_what_cannot_be_started(command: list[str], code: int, text: str) -> None:
    done = start(*command, env=clean() | open_mpi())
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_contradicting_launchers_are_named() -> None:
    done = start("true", env=clean(RANK="0", WORLD_SIZE="2") | open_mpi())
    assert done.returncode == 2
    assert "RANK=0 WORLD_SIZE=2 and OMPI_COMM_WORLD_RANK=3" in done.stderr


CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")


@CORES
@pytest.mark.parametrize(
    ("added", "undone"),
    [({}, True), ({"OMPI_MCA_hwloc_base_binding_policy": "core"}, False)],
)
def test_a_binding_to_one_core_is_undone(added: dict[str, str], undone: bool) -> None:
    core = min(os.sched_getaffinity(0))
    done = start(
        *SHOW,
        env=clean() | open_mpi() | added,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert (len(json.loads(done.stdout)[3]) > 1) is undone


@CORES
def test_a_binding_of_mpirun_itself_is_kept() -> None:
    """As by taskset; between mpirun and smddprun there may be a shell."""
    core = min(os.sched_getaffinity(0))
    names = " ".join(f"{name}={value}" for name, value in open_mpi().items())
    line = shlex.join([*SMDDPRUN, *SHOW])
    script = f"env {names} sh -c {shlex.quote(line + '; true')}; true"
    done = subprocess.run(
        ["sh", "-c", script],
        env=clean(),
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        **{"capture_output": True, "text": True, "timeout": HANG_S, "check": True},
    )
    assert json.loads(done.stdout)[3] == [core]


# ---- by hand ------------------------------------------------------------------------------------


def test_by_hand_it_starts_the_ranks() -> None:
    done = start("-n", "2", *SHOW, "a b", "", env=clean())
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(line.partition("] ")[2]) for line in sorted(done.stdout.splitlines())]
    for rank, (_, arguments, environment, _) in enumerate(ranks):
        assert arguments == ["a b", ""]
        names = ("RANK", "LOCAL_RANK", "SMDATAPARALLEL_WORLD_RANK", "SMDATAPARALLEL_LOCAL_RANK")
        assert [environment[name] for name in names] == [str(rank)] * 4


@pytest.mark.parametrize(
    "shell",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},  # as containers have it
        {f"SLURM_{name}": "0" for name in ("PROCID", "STEP_ID")}
        | {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"},  # of srun --pty
    ],
)
def test_by_hand_in_the_shell_of_another_launcher(shell: dict[str, str]) -> None:
    done = start("-n", "2", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE", env=clean(**shell))
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]


def test_modules_in_the_current_folder_do_not_stand_before_pythons_own(tmp_path: Path) -> None:
    (tmp_path / "typing.py").write_text("raise SystemExit('not this one')")
    smddprun = [sys.executable, "-c", "import sys; sys.path.remove(''); from sdp_plugins.launch."]
    smddprun[-1] += "smddprun import smddprun; smddprun()"
    line = [*smddprun, "-n", "1", "echo", "hi"]
    done = subprocess.run(line, env=clean(), cwd=tmp_path, stdout=subprocess.PIPE, timeout=HANG_S)
    assert done.stdout == b"[rank 0] hi\n"


def test_by_hand_a_failing_rank_is_the_jobs_exit_code() -> None:
    done = start("-n", "2", "sh", "-c", 'test "$RANK" = 0 || exit 5', env=clean())
    assert done.returncode == 5
    assert "\nsmddprun: rank 1 (pid " in done.stderr and "sdp run" not in done.stderr


def test_by_hand_a_program_that_is_not_there() -> None:
    done = start("-n", "2", "no-such-program", env=clean())
    assert (done.returncode, done.stderr) == (
        127,
        "smddprun: there is no program 'no-such-program'\n",
    )
