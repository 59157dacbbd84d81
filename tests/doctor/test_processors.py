"""Faults of processors and threads, NUMA, and huge pages."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from sdp_plugins.doctor.finding import Status
from tests.control_groups import control_group, entering
from tests.doctor.machines import (
    changed,
    doctor,
    findings,
    healthy,
    importing,
    problem,
    real_problem,
    with_variables,
    write,
)
from tests.flight.cases import one_is_late, queue_many, until_seen
from tests.launch.jobs import launch
from tests.ranks import Start

CORES = os.sched_getaffinity(0)

# ---- of this machine ----------------------------------------------------------------------------


def test_too_many_threads() -> None:
    found = real_problem("threads", OMP_NUM_THREADS=f"{len(CORES) + 1},2")
    assert found["text"].endswith(f"{2 * len(CORES) + 2} threads on {len(CORES)} cores")
    assert found["remedy"] == f"export OMP_NUM_THREADS={max(1, len(CORES) // 2)}"
    assert found["slows"]


def test_more_ranks_than_cores() -> None:
    found = real_problem("ranks-per-core", lambda: os.sched_setaffinity(0, {min(CORES)}))
    assert found["text"].startswith("2 ranks share 1 cores")
    assert found["remedy"] == "sdp run -n 1"


@pytest.mark.skipif(len(CORES) < 2, reason="there is one core")
def test_bound_to_one_core() -> None:
    found = real_problem("core-binding", lambda: os.sched_setaffinity(0, {min(CORES)}))
    assert "bound to one of" in found["text"] and "taskset -cp 0-" in found["remedy"]


@pytest.mark.parametrize(
    ("groups", "file", "cores", "remedy"),
    [
        ("0::/job\n", "job/cpuset.cpus.effective", "2", "give the container, or the job, more"),
        ("0::/job\n", "job/cpuset.cpus.effective", "2-3", "taskset -cp 2-3 $$"),
        ("0::/gone\n", "cpuset.cpus.effective", "2", "give the container, or the job, more"),
        ("4:cpuset:/x\n", "cpuset/x/cpuset.effective_cpus", "2", "give the container, or the job"),
        ("4:memory:/x\n", "memory/x/other", "2", "taskset -cp 0-3 $$"),
    ],
)
def test_a_set_of_cores(tmp_path: Path, groups: str, file: str, cores: str, remedy: str) -> None:
    """No process can leave the cores of its control group."""
    machine = changed(healthy(tmp_path), cores=frozenset({2}))
    write(tmp_path, {"proc/self/cgroup": groups, f"sys/fs/cgroup/{file}": f"{cores}\n"})
    assert problem(machine, "core-binding").remedy.startswith(remedy)


def test_a_quota_of_a_real_control_group() -> None:
    half = str(50000 * len(CORES))
    with control_group("cpu", cfs_period_us="100000", cfs_quota_us=half) as group:
        found = real_problem("cpu-quota", lambda: entering(group))
    assert f"allows the time of {len(CORES) / 2:g} of the {len(CORES)} cores" in found["text"]
    assert "export OMP_NUM_THREADS=1" in found["remedy"] and not found["slows"]


def test_too_few_processes_in_a_real_control_group() -> None:
    with control_group("pids", max="30") as group:
        found = real_problem("processes", lambda: entering(group))
    assert "a control group allows" in found["text"] and "--pids-limit" in found["remedy"]


def test_a_rank_of_sdp_run() -> None:
    """The launcher's own variables are known, and its threads fit."""
    checks = ("unknown-variables", "launchers", "threads", "settings")
    options = [word for check in checks for word in ("--check", check)]
    done = launch("-n", "2", "--no-prefix", "-m", "sdp_plugins.doctor", *options)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == ["4 ok, 0 skipped, 0 warning, 0 error (--all shows them)"] * 2, lines


def test_another_job(start_pooled: Start) -> None:
    with start_pooled(2, one_is_late, "absent") as ranks:
        until_seen(ranks, "for rank 1")
        key = ranks.environment["SDP_JOB_ID"]
        (told,) = [one for one in other_jobs() if key in one["text"]]
    assert "uses the cores" in told["text"] and "kill " in told["remedy"]


def test_a_job_that_has_lost_a_rank(start_pooled: Start) -> None:
    with start_pooled(3, queue_many) as ranks:
        until_seen(ranks, "for ranks 1, 2")
        os.kill(ranks[2].pid, signal.SIGKILL)
        until_seen(ranks, "has ended")
        key = ranks.environment["SDP_JOB_ID"]
        (told,) = [one for one in other_jobs() if key in one["text"]]
        assert "has lost 1 of its ranks" in told["text"]
        alive = " ".join(map(str, sorted(rank.pid for rank in ranks[:2])))
        assert told["remedy"] == f"if it is yours, end it: kill {alive}"


def other_jobs() -> list[dict[str, str]]:
    found = json.loads(doctor("--json", "--check", "other-jobs").stdout)["findings"]
    return [one for one in found if one["status"] == "warning"]


# ---- of machines that files describe -------------------------------------------------------------


def test_threads_under_another_launcher(tmp_path: Path) -> None:
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    machine = with_variables(healthy(tmp_path), **mpi)
    found = problem(machine, "threads")
    assert found.remedy.startswith("sdp run --threads 2; with mpirun: -x OMP_NUM_THREADS=2")
    hosts = changed(healthy(tmp_path), hosts=("a", "b"))
    assert problem(hosts, "threads").remedy == found.remedy
    found = problem(machine, "malloc-huge-pages")
    assert found.remedy.startswith("export GLIBC_TUNABLES=glibc.malloc.hugetlb=1")


def test_too_many_engine_threads(tmp_path: Path) -> None:
    machine = with_variables(healthy(tmp_path), SDP_ENGINE_THREADS="4")
    assert problem(machine, "engine-threads").remedy == "unset SDP_ENGINE_THREADS"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, "1.5"),
        ({"sys/fs/cgroup/cpu.max": "300000 100000\n"}, "3"),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n0::/\n",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000\n",
            },
            "0.5",
        ),
    ],
    ids=["version 2", "of a parent", "version 1"],
)
def test_a_quota(tmp_path: Path, files: dict[str, str], cores: str) -> None:
    machine = healthy(tmp_path)
    write(tmp_path, files)
    found = problem(machine, "cpu-quota")
    assert f"allows the time of {cores} of the 4 cores" in found.text
    assert found.remedy.startswith("start the ranks by sdp run") and not found.slows
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    assert problem(with_variables(machine, **mpi), "cpu-quota").slows


def test_no_quota_of_version_1(tmp_path: Path) -> None:
    machine = healthy(tmp_path)
    files = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}
    write(tmp_path, {"proc/self/cgroup": "4:cpu:/\n"})
    write(tmp_path / "sys/fs/cgroup/cpu", files)
    assert [f.status for f in findings(machine, "cpu-quota")] == [Status.ok]


def test_the_lowest_frequency(tmp_path: Path) -> None:
    machine = healthy(tmp_path)
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    write(tmp_path, {f"{folder}/scaling_governor": "powersave\n"})
    assert problem(machine, "frequency").remedy == "sudo cpupower frequency-set -g performance"
    write(tmp_path, {f"{folder}/scaling_driver": "intel_pstate\n"})  # it follows the load
    assert [f.status for f in findings(machine, "frequency")] == [Status.ok]


def test_a_busy_machine(tmp_path: Path) -> None:
    machine = healthy(tmp_path)
    write(tmp_path, {"proc/loadavg": "9.75 3.00 1.00 4/200 4242\n"})
    found = problem(machine, "load")
    assert "9.75 on 4 cores" in found.text and "`top`" in found.remedy


@pytest.mark.parametrize(("idle", "status"), [(5, Status.warning), (80, Status.ok)])
def test_a_machine_that_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: int, status: Status
) -> None:
    """The load is an average over a minute."""
    machine = healthy(tmp_path)
    busy = {"proc/loadavg": "9.75 3.00 1.00 4/200 4242\n"}
    write(tmp_path, {**busy, "proc/stat": "cpu  100 5 20 1000 30 0 0 0 0 0\ncpu0 1 1 1 1\n"})

    def pass_time(seconds: float) -> None:
        now = f"cpu  {200 - idle} 5 20 {1000 + idle - 1} 31 0 0 0 0 0\ncpu0 1 1 1 1\n"
        write(tmp_path, {"proc/stat": now})

    monkeypatch.setattr(time, "sleep", pass_time)
    (found,) = findings(machine, "load")
    assert found.status is status, found


def test_a_processor_without_avx2(tmp_path: Path) -> None:
    machine = healthy(tmp_path)
    write(tmp_path, {"proc/cpuinfo": "flags\t\t: fpu sse2 avx\n"})
    assert "-cpu host" in problem(machine, "instruction-set").remedy


def test_two_openmp_libraries(tmp_path: Path) -> None:
    libraries = ["/site/libgomp.so.1", "/opt/intel/libiomp5.so"]
    found = problem(importing(healthy(tmp_path), openmp=libraries), "openmp-runtimes")
    assert "libiomp5" in found.text and "either pip or conda" in found.remedy and found.slows


NODES = {"node0/cpulist": "0-1\n", "node1/cpulist": "2-3\n"}


def two_nodes(folder: Path) -> Path:
    return write(folder / "sys/devices/system/node", NODES)


def test_ranks_that_do_not_stay_on_a_node(tmp_path: Path) -> None:
    machine = healthy(tmp_path)
    two_nodes(tmp_path)
    assert [f.status for f in findings(machine, "numa-binding")] == [Status.ok]
    off = with_variables(machine, SDP_NUMA="0")
    assert problem(off, "numa-binding").remedy == "unset SDP_NUMA"
    three = changed(machine, given_ranks=3)
    assert problem(three, "numa-binding").remedy.startswith("sdp run -n 2")
    mpi = with_variables(machine, PMI_RANK="0", PMI_SIZE="2")
    hosts = changed(machine, hosts=("a", "b"))
    for one in (mpi, hosts):
        assert "mpirun --bind-to numa" in problem(one, "numa-binding").remedy


def test_memory_of_another_node(tmp_path: Path) -> None:
    machine = changed(healthy(tmp_path), cores=frozenset({2, 3}))
    two_nodes(tmp_path)
    found = problem(machine, "numa-memory")
    assert "runs on NUMA node 1 but may only use memory of 0" in found.text
    assert "numactl --cpunodebind=0 --membind=0" in found.remedy


def test_no_huge_pages(tmp_path: Path) -> None:
    machine = healthy(tmp_path)
    write(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"})
    assert "echo madvise" in problem(machine, "transparent-huge-pages").remedy
    old = changed(machine, c_library="glibc 2.31")
    assert "glibc 2.35" in problem(old, "malloc-huge-pages").remedy
