"""`sdp run`: what the ranks get, and what it refuses."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sdp_plugins.launch.cli import PROGRAMS
from sdp_plugins.launch.job_environment import shared_malloc
from sdp_plugins.launch.rank_count import default_rank_count, usable_cores
from tests.control_groups import control_group, entering
from tests.launch.jobs import ROOT, Script, launch
from tests.ranks import HANG_S


def test_arguments_reach_the_script_untouched(script: Script) -> None:
    arguments = ["a b", "", "-n", "5", "--", "--help", "*", "-m", "--timeout=1", "ä", "'\""]
    path = script("import json; print(json.dumps(sys.argv))")
    done = launch("-n", "2", "--no-prefix", path, *arguments)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[path, *arguments]] * 2


def test_environment_of_the_ranks(script: Script) -> None:
    path = script("import json; print(json.dumps(dict(os.environ)))")
    outer = {"SLURM_NTASKS": "1", "OMPI_COMM_WORLD_RANK": "7", "SLURM_JOB_ID": "9", "RANK": "5"}
    outer["SDP_LAUNCHER_PID"] = "1"  # of an outer Lightning job
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | outer
    done = launch("-n", "3", "--no-prefix", path, env=env)
    ranks = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda e: e["RANK"])
    assert [(e["RANK"], e["LOCAL_RANK"]) for e in ranks] == [(str(i), str(i)) for i in range(3)]
    for name in ("SDP_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_PORT"):
        assert len({e[name] for e in ranks}) == 1
    for e in ranks:
        assert (e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"], e["MASTER_ADDR"]) == ("3", "3", "127.0.0.1")
        assert e["NODE_RANK"] == e["GROUP_RANK"] == "0"
        assert "SLURM_NTASKS" not in e and "SDP_LAUNCHER_PID" not in e
        assert "OMPI_COMM_WORLD_RANK" not in e
        assert e["SLURM_JOB_ID"] == "9"
    again = json.loads(launch("-n", "1", "--no-prefix", path).stdout)
    assert again["SDP_JOB_ID"] != ranks[0]["SDP_JOB_ID"]


def test_threads(script: Script) -> None:
    """As asked for, or as set already, or a share of the cores."""
    path = script("print(os.environ['OMP_NUM_THREADS'])")
    unset = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    share = max(1, usable_cores() // 2)
    for options, variables, threads in (
        (["--threads", "3"], {"OMP_NUM_THREADS": "5"}, 3),
        ([], {"OMP_NUM_THREADS": "5"}, 5),
        ([], {}, share),
    ):
        done = launch("-n", "2", "--no-prefix", *options, path, env=unset | variables)
        assert done.stdout.split() == [str(threads)] * 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_cores_whose_time_a_control_group_limits(script: Script) -> None:
    """As in a container with a limit: ranks and threads are those that the limit lets run."""
    path = script("print(os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'])")
    unset = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with control_group("cpu", cfs_period_us="100000", cfs_quota_us="150000") as group:
        for options in ([], ["-n", "1"]):
            command = [*options, "--no-prefix", path]
            done = launch(*command, env=unset, preexec_fn=lambda: entering(group))
            assert done.stdout == "1 1\n", done.stderr


def test_huge_pages(script: Script) -> None:
    """Asked for, unless somebody has said something about them."""
    path = script("print(os.environ['GLIBC_TUNABLES'])")
    unset = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    for before, after in (
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=0"}, "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ):
        done = launch("-n", "2", "--no-prefix", path, env=unset | before)
        assert done.stdout.split() == [after] * 2


def test_the_allocator_of_large_blocks(script: Script) -> None:
    """Loaded before what the user has, once, unless nothing is to be registered."""
    path = script(
        "import ctypes, os\n"
        "print(hasattr(ctypes.CDLL(None), 'sdp_shared_malloc_open'))\n"
        "print([os.path.basename(p) for p in os.environ.get('LD_PRELOAD', '').split(':')])"
    )
    unset = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "SDP_REGISTER")}
    ours = "libsdp_shared_malloc.so"
    for before, after in (
        ({}, [ours]),
        ({"LD_PRELOAD": "libm.so.6"}, [ours, "libm.so.6"]),
        ({"SDP_REGISTER": "0", "LD_PRELOAD": "libm.so.6"}, ["libm.so.6"]),
        (shared_malloc({}), [ours]),
    ):
        done = launch("-n", "1", "--no-prefix", path, env=unset | before)
        assert done.stdout.splitlines() == [str(ours in after), str(after)], done.stderr


def test_module(tmp_path: Path) -> None:
    done = launch("-n", "2", "-m", "json.tool", "--help")
    assert done.returncode == 0
    assert done.stdout.count("] usage: ") == 2


def test_works_without_frameworks_and_starts_fast() -> None:
    code = (
        "import sys, sdp_plugins.launch.cli\n"
        "print([m for m in ('torch', 'numpy', 'lightning', 'mpi4py', 'tensorflow', 'jax', "
        "'sdp_plugins.core.group', 'sdp_plugins.core._native') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_stdin_is_rank_zeros(script: Script) -> None:
    path = script("print(repr(sys.stdin.read()))")
    done = launch("-n", "2", path, input="hello\n")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 'hello\\n'", "[rank 1] ''"]


def test_the_machine_says_how_many_ranks(script: Script) -> None:
    path = script("print(os.environ['WORLD_SIZE'])")
    count = default_rank_count()
    done = launch("--no-prefix", path, "-n", "9")
    assert done.stdout.split() == [str(count)] * count
    assert f"starting {count} ranks on this machine (set the number with -n, before" in done.stderr
    done = launch("--no-prefix", "--nproc-per-node", "2", path)
    assert (done.stdout.split(), done.stderr) == (["2", "2"], "")


def test_programs_of_the_package_are_subcommands() -> None:
    for name, (module, _) in PROGRAMS.items():
        lines = [[sys.executable, "-m", *line] for line in (["sdp_plugins.launch", name], [module])]
        one, other = [
            subprocess.run(
                [*line, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=HANG_S
            )
            for line in lines
        ]
        assert one.stdout + one.stderr
        assert (one.returncode, one.stdout, one.stderr) == (
            *(other.returncode, other.stdout, other.stderr),
        )


@pytest.mark.parametrize("files", range(30, 35))
def test_ranks_that_cannot_be_started(script: Script, files: int) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    done = launch("-n", "40", script("time.sleep(600)"), preexec_fn=limit)
    assert done.returncode == 1
    message = "sdp run: cannot start the ranks: [Errno 24] Too many open files"
    assert done.stderr in (f"{message}\n", f"{message}: '/dev/null'\n")  # also a rank's stdin


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "2", "--mpirun", "/usr/bin/mpirun", __file__], "--mpirun is for ranks on hosts"),
        (["-n", "2", "no such script.py"], "there is no script 'no such script.py'"),
        (["-n", "0", "x.py"], "-n"),
        (["-n", "two", "x.py"], "-n"),
        (["x.py"], "there is no script 'x.py'"),
        (["--lr", "0.1", __file__], "no option --lr. Hint: options of the script go after it."),
        (["-m", "-z", "tests"], "no option -z. Hint: options of the script go after it."),
        (["--rank=2", __file__], "no option --rank=2. Hint: did you mean --ranks?"),
        (["--nproc-per-node", "2", "--hosts", "a,b", __file__], "--nproc-per-node is for this"),
        (["-n", "2"], "SCRIPT"),
    ],
)
def test_misuse_is_explained(args: list[str], message: str) -> None:
    done = launch(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_torch_recognises_the_job(script: Script) -> None:
    """As does Lightning: `tests.lightning.test_jobs` starts one so."""
    if find_spec("torch") is None:
        pytest.skip("no torch here")
    path = script(
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        print(dist.get_rank(), dist.get_world_size())
        dist.barrier()  # who ends while others still connect makes them fail
        dist.destroy_process_group()
        """
    )
    done = launch("-n", "2", path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] {r} 2" for r in range(2)]
