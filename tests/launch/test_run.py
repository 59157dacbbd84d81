"""`sdp run`: what the ranks get, what comes out, and how a job ends."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from sdp_plugins.launch.cli import PROGRAMS
from sdp_plugins.launch.rank_count import default_rank_count
from tests.processes import runs, wait_until_gone
from tests.ranks import HANG_S
from tests.side_by_side import side_by_side

Done = subprocess.CompletedProcess[str]
LAUNCHER = [sys.executable, "-m", "sdp_plugins.launch", "run"]
ROOT = Path(__file__).parents[2]


HEADER = """
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def await_file(name):
    while not pathlib.Path(__file__).with_name(name).exists(): time.sleep(0.01)
def touch(name):
    pathlib.Path(__file__).with_name(name).touch()
def lose(text):
    from sdp_plugins.core import PeerLostError
    from sdp_plugins.core.error_file import write_uncaught
    write_uncaught()
    text = f"[rank {rank}/{os.environ['WORLD_SIZE']}] all_reduce #3: {text}"
    raise PeerLostError(text, ranks=[1], op="all_reduce", seq=3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Writes a script; those of several jobs, which have files of their own, into folders."""

    def write(text: str, folder: str = ".") -> str:
        path = tmp_path / folder / "a script.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(HEADER + textwrap.dedent(text))
        return str(path)

    return write


def launch(*args: str, timeout_s: float = 60, **options: Any) -> Done:
    return subprocess.run(
        [*LAUNCHER, *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        **options,
    )


def launch_all(*jobs: tuple[str, ...]) -> list[Done]:
    """Several at once: they mostly wait."""
    return side_by_side(launch, jobs)


def start(*args: str) -> subprocess.Popen[str]:
    """A launcher in a session of its own, so that signals reach it alone."""
    return subprocess.Popen(
        [*LAUNCHER, *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def read_pids(launcher: subprocess.Popen[str], count: int) -> list[int]:
    """The pids that the ranks print, one a line, last word."""
    assert launcher.stdout
    return [int(launcher.stdout.readline().split()[-1]) for _ in range(count)]


def test_arguments_reach_the_script_untouched(script: Callable[..., str]) -> None:
    arguments = ["a b", "", "-n", "5", "--", "--help", "*", "-m", "--timeout=1", "ä", "'\""]
    path = script("import json; print(json.dumps(sys.argv))")
    done = launch("-n", "2", "--no-prefix", path, *arguments)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[path, *arguments]] * 2


def test_environment_of_the_ranks(script: Callable[..., str]) -> None:
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


def test_threads(script: Callable[..., str]) -> None:
    """As asked for, or as set already, or a share of the cores."""
    path = script("print(os.environ['OMP_NUM_THREADS'])")
    unset = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    for options, variables, threads in (
        (["--threads", "3"], {"OMP_NUM_THREADS": "5"}, 3),
        ([], {"OMP_NUM_THREADS": "5"}, 5),
        ([], {}, share),
    ):
        done = launch("-n", "2", "--no-prefix", *options, path, env=unset | variables)
        assert done.stdout.split() == [str(threads)] * 2


def test_huge_pages(script: Callable[..., str]) -> None:
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


def test_stdin_is_rank_zeros(script: Callable[..., str]) -> None:
    path = script("print(repr(sys.stdin.read()))")
    done = launch("-n", "2", path, input="hello\n")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 'hello\\n'", "[rank 1] ''"]


def test_lines_are_prefixed_and_never_mixed(script: Callable[..., str]) -> None:
    path = script(
        """
        for i in range(300):
            sys.stdout.write(f"{rank}-{i} "); sys.stdout.write("x" * 200 + "\\n")
            print(f"e{rank}-{i}", file=sys.stderr)
        """
    )
    done = launch("-n", "4", path)
    assert done.returncode == 0
    wanted = {f"[rank {r}] {r}-{i} {'x' * 200}" for r in range(4) for i in range(300)}
    assert set(done.stdout.splitlines()) == wanted
    for rank in range(4):
        mine = [line for line in done.stderr.splitlines() if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] e{rank}-{i}" for i in range(300)]


def test_output_is_not_held_back(script: Callable[..., str]) -> None:
    launcher = start("-n", "1", script("print('at once'); time.sleep(600)"))
    assert launcher.stdout
    assert launcher.stdout.readline() == "[rank 0] at once\n"
    launcher.terminate()
    launcher.communicate(timeout=HANG_S)


def test_exit_code_of_the_first_failure(script: Callable[..., str]) -> None:
    path = script("if rank == 1: sys.exit(int(sys.argv[1]))\ntime.sleep(600)")
    codes = [1, 7, 255]
    done = launch_all(*(("-n", "3", path, str(code)) for code in codes))
    assert [job.returncode for job in done] == codes


def test_a_rank_that_others_waited_for_in_vain(script: Callable[..., str]) -> None:
    text = "if os.environ['RANK'] == '1': sys.exit()\ntime.sleep(1.5)\nraise OSError('no peer')"
    done = launch("-n", "2", script(text))
    assert "failed first: exit code 1, after rank 1 had ended without an error." in done.stderr


def test_exit_code_of_a_signal(script: Callable[..., str]) -> None:
    path = script("if rank == 2: os.kill(os.getpid(), int(sys.argv[1]))\ntime.sleep(600)")
    numbers = [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]
    done = launch_all(*(("-n", "3", path, str(int(number))) for number in numbers))
    for number, job in zip(numbers, done, strict=True):
        assert job.returncode == 128 + number
        assert "rank 2 (pid " in job.stderr and f"killed by {number.name}" in job.stderr


def test_first_traceback_comes_last(script: Callable[..., str]) -> None:
    path = script(
        """
        def stop(*_): raise RuntimeError("a later failure")
        signal.signal(signal.SIGTERM, stop)
        print("noise", file=sys.stderr)
        touch(f"ready {rank}")
        if rank == 2:
            for other in (0, 1): await_file(f"ready {other}")
            try: {}["key"]
            except KeyError as error: raise ValueError("the reason") from error
        time.sleep(600)
        """
    )
    done = launch("-n", "3", path)
    assert done.returncode == 1
    head, _, last = done.stderr.rpartition("sdp run: rank 2 ")
    assert "failed first: exit code 1" in last
    assert last.rstrip().endswith("ValueError: the reason")
    assert "KeyError: 'key'" in last and "noise" not in last and "a later failure" not in last
    assert "a later failure" in head


# Rank 0 loses rank 1, but has ended before it: `late()` is after that.
LATE = """
def state(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
def late():
    await_file("pid")
    while state(pathlib.Path(__file__).with_name("pid").read_text()) != "Z": time.sleep(0.01)
    time.sleep(0.1)
def early(text):
    pid = pathlib.Path(__file__).with_name("new pid")
    pid.write_text(str(os.getpid()))
    pid.rename(pid.with_name("pid"))
    lose(text)
"""


def test_the_cause_may_come_after_who_it_befalls(script: Callable[..., str]) -> None:
    causes = {"raise ValueError('boom')": 1, "os.kill(os.getpid(), 9)": 137, "sys.exit(7)": 7}
    text = (
        LATE
        + "if rank == 2: time.sleep(600)\n"
        + "if rank == 0: early('rank 1 gave up: ValueError: boom')\n"
        + "late()\n"
    )
    jobs = launch_all(*(("-n", "3", script(text + cause, cause)) for cause in causes))
    for done, code in zip(jobs, causes.values(), strict=True):
        assert done.returncode == code, done.stderr
        _, _, last = done.stderr.rpartition("sdp run: rank 1 ")
        assert "failed first" in last and "PeerLostError" not in last


def test_the_rank_that_others_name_is_blamed(script: Callable[..., str]) -> None:
    path = script(
        LATE
        + "if rank == 0: early('rank 1 gave up: ValueError: boom')\n"
        + "late()\nprint('PeerLostError: seen and ignored', file=sys.stderr)\nsys.exit(7)"
    )
    done = launch("-n", "2", path)
    assert done.returncode == 7, done.stderr
    assert "sdp run: rank 1 " in done.stderr


def test_who_exits_without_a_word_may_have_lost_another(script: Callable[..., str]) -> None:
    path = script(
        """
        if rank == 1:
            await_file("failing")
            sys.exit(3)  # it has caught the loss of rank 0, which is slow to end
        import atexit
        atexit.register(time.sleep, 0.4)
        touch("failing")
        raise ValueError("the reason")
        """
    )
    done = launch("-n", "2", path)
    assert done.returncode == 1, done.stderr
    _, _, last = done.stderr.rpartition("sdp run: rank 0 ")
    assert "failed first" in last and last.rstrip().endswith("ValueError: the reason")


def test_a_loss_that_was_only_logged_is_no_reason(script: Callable[..., str]) -> None:
    path = script(
        """
        if rank == 0:
            print("WARNING PeerLostError: went on without it", file=sys.stderr)
            touch("failing")
            raise ValueError("the reason")
        await_file("failing")
        time.sleep(0.5)
        raise KeyError("later")
        """
    )
    done = launch("-n", "2", path)
    assert "sdp run: rank 0 " in done.stderr, done.stderr


def test_who_lost_a_rank_is_blamed_if_no_other_failed(script: Callable[..., str]) -> None:
    text = "if rank == 0: lose('rank 1 has closed the group')\n"
    endings = ["sys.exit(0)", "time.sleep(600)"]
    jobs = launch_all(*(("-n", "2", script(text + ending, ending)) for ending in endings))
    for done in jobs:
        assert done.returncode == 1
        assert "sdp run: rank 0 " in done.stderr
        assert done.stderr.rstrip().endswith("rank 1 has closed the group")


def test_a_signal_ends_the_wait_for_the_cause(script: Callable[..., str]) -> None:
    path = script("print(os.getpid())\nif rank == 0: lose('rank 1 gave up')\ntime.sleep(600)")
    launcher = start("-n", "2", path)
    pids = read_pids(launcher, 2)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=HANG_S)
    assert launcher.returncode
    wait_until_gone(pids)


def test_a_rank_that_ignores_sigterm_is_killed(script: Callable[..., str]) -> None:
    path = script(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        touch(f"ready {rank}")
        if rank == 0:
            await_file("ready 1")
            sys.exit(3)
        time.sleep(600)
        """
    )
    done = launch("-n", "2", path)
    assert done.returncode == 3
    wait_until_gone([int(line.split()[-1]) for line in done.stdout.splitlines()])


def test_time_out(script: Callable[..., str]) -> None:
    done = launch("-n", "2", "--timeout", "1", script("if rank: time.sleep(600)"))
    assert done.returncode == 124
    assert "still running: rank 1" in done.stderr


HANGING = """
import time
from sdp_plugins.core import Group
def asleep(): time.sleep(600)
with Group.from_env() as group:
    group.barrier()
    if rank == 1: asleep()
    print("waits", flush=True)
    group.barrier()
"""


def test_a_time_out_shows_who_waits_and_where_ranks_are(script: Callable[..., str]) -> None:
    done = launch("-n", "2", "--timeout", "15", script(HANGING))
    assert done.returncode == 124
    _, _, last = done.stderr.partition("the time is up; still running: rank 0, 1\n")
    assert re.search(r"  rank 0 has waited [\d.]+ s in barrier #\d+ for rank 1\n", last), (
        done.stderr
    )
    assert re.search(r'\[rank 1\]   File ".*a script.py", line \d+ in asleep\n', last)
    assert re.search(r'\[rank 0\]   File ".*group.py", line \d+ in barrier\n', last)


def test_a_time_out_of_a_rank_names_who_is_absent(script: Callable[..., str]) -> None:
    done = launch("-n", "2", script(HANGING), env={**os.environ, "SDP_TIMEOUT_S": "10"})
    assert done.returncode == 1
    _, _, last = done.stderr.rpartition("\nsdp run: ")
    assert re.match(r"rank 1 did not arrive at barrier #\d+ in 10 s; rank 0 \(pid ", last), (
        done.stderr
    )
    assert "CollectiveTimeoutError" in last
    assert re.search(r'\[rank 1\]   File ".*a script.py", line \d+ in asleep\n', done.stderr)


def test_sigusr1_shows_where_ranks_are(script: Callable[..., str]) -> None:
    launcher = start("-n", "2", script(HANGING))
    assert launcher.stdout and launcher.stderr
    assert launcher.stdout.readline() == "[rank 0] waits\n"
    launcher.send_signal(signal.SIGUSR1)
    seen = ""
    while "in asleep\n" not in seen:
        line = launcher.stderr.readline()
        assert line, seen
        seen += line
    assert "for rank 1" in seen
    assert launcher.poll() is None  # the job goes on
    launcher.terminate()
    launcher.communicate(timeout=HANG_S)


def test_the_machine_says_how_many_ranks(script: Callable[..., str]) -> None:
    path = script("print(os.environ['WORLD_SIZE'])")
    count = default_rank_count()
    done = launch("--no-prefix", path, "-n", "9")
    assert done.stdout.split() == [str(count)] * count
    assert (
        f"starts {count} ranks on this machine (-n before {path}, not after it, sets" in done.stderr
    )
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


def test_a_time_out_of_many_days(script: Callable[..., str]) -> None:
    done = launch("-n", "1", "--timeout", "1e10", script("time.sleep(0.2)"))
    assert done.returncode == 0, done.stderr


def test_ctrl_c_is_passed_on_once(script: Callable[..., str]) -> None:
    path = script(
        """
        count = 0
        def interrupted(*_):
            global count
            count += 1
            print("interrupted", count, flush=True)
        signal.signal(signal.SIGINT, interrupted)
        print(os.getpid(), flush=True)
        end = time.monotonic() + 200
        while not count and time.monotonic() < end: time.sleep(0.01)
        time.sleep(0.5)
        sys.exit(0)
        """
    )
    launcher = start("-n", "2", path)
    read_pids(launcher, 2)
    launcher.send_signal(signal.SIGINT)
    stdout, stderr = launcher.communicate(timeout=HANG_S)
    assert sorted(stdout.splitlines()) == [f"[rank {r}] interrupted 1" for r in range(2)]
    assert launcher.returncode == 0, stderr  # the script coped with it


def test_ctrl_c_ends_a_plain_script(script: Callable[..., str]) -> None:
    # Not one long sleep: Python misses a signal that comes just before the call sleeps.
    path = script("print(os.getpid())\nwhile True: time.sleep(0.1)")
    launcher = start("-n", "2", path)
    pids = read_pids(launcher, 2)
    launcher.send_signal(signal.SIGINT)
    _, stderr = launcher.communicate(timeout=HANG_S)
    assert launcher.returncode == 128 + signal.SIGINT
    assert "failed first" not in stderr
    wait_until_gone(pids)


def test_second_ctrl_c_kills(script: Callable[..., str]) -> None:
    path = script(
        "signal.signal(signal.SIGINT, lambda *_: print('got it', flush=True))\n"
        "print(os.getpid())\nend = time.time() + 600\nwhile time.time() < end: time.sleep(1)"
    )
    launcher = start("-n", "2", path)
    pids = read_pids(launcher, 2)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout
    assert [launcher.stdout.readline().split("] ")[1] for _ in range(2)] == ["got it\n"] * 2
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=HANG_S)
    assert launcher.returncode == 128 + signal.SIGINT
    wait_until_gone(pids)


def test_ctrl_c_while_ranks_are_started(script: Callable[..., str]) -> None:
    path = script("time.sleep(60)")
    launcher = start("-n", "40", path)
    ranks = psutil.Process(launcher.pid)
    while not ranks.children():
        time.sleep(0.001)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=HANG_S)
    # Had it not reached them, they would end by SIGTERM, later.
    assert launcher.returncode == 128 + signal.SIGINT


def test_the_time_is_up_while_ranks_are_started(script: Callable[..., str]) -> None:
    done = launch("-n", "400", "--timeout", "0.3", script("time.sleep(60)"))
    assert done.returncode == 124
    assert "sdp run: the time is up; " in done.stderr and "399" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_ends_the_job(script: Callable[..., str], number: signal.Signals) -> None:
    launcher = start("-n", "2", script("print(os.getpid()); time.sleep(600)"))
    pids = read_pids(launcher, 2)
    launcher.send_signal(number)
    launcher.communicate(timeout=HANG_S)
    assert launcher.returncode == 128 + signal.SIGTERM
    wait_until_gone(pids)


FAMILY = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
other = subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp)
print(os.getpid(), flush=True)
print(child.pid, flush=True)
print(other.pid, flush=True)
"""


def test_nothing_survives_a_kill_of_the_launcher(script: Callable[..., str]) -> None:
    launcher = start("-n", "2", script(FAMILY + "time.sleep(600)"))
    pids = read_pids(launcher, 6)
    assert all(runs(pid) for pid in pids)
    launcher.kill()
    wait_until_gone(pids)
    launcher.communicate(timeout=HANG_S)  # the end of its pipes: nobody holds them any more


@pytest.mark.parametrize("ending", ["sys.exit(0)", "sys.exit(4 * rank)", "os.kill(os.getpid(), 9)"])
def test_nothing_survives_the_job(script: Callable[..., str], ending: str, tmp_path: Path) -> None:
    launcher = start("-n", "2", script(FAMILY + f"await_file('go')\n{ending}"))
    pids = read_pids(launcher, 6)
    (tmp_path / "go").touch()
    launcher.communicate(timeout=HANG_S)
    wait_until_gone(pids)


def test_it_kills_only_what_it_started(script: Callable[..., str]) -> None:
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        launch("-n", "2", script("sys.exit(1)"))
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_reader_that_leaves_ends_the_job(script: Callable[..., str]) -> None:
    path = script("print(os.getpid())\nwhile True: print('y'); time.sleep(0.01)")
    launcher = start("-n", "1", path)
    pids = read_pids(launcher, 1)
    assert launcher.stdout and launcher.stderr
    launcher.stdout.close()
    assert launcher.wait(timeout=HANG_S) == 128 + signal.SIGPIPE
    launcher.stderr.close()
    wait_until_gone(pids)


LOUD = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
count = pathlib.Path(__file__).with_name(f"count {rank}")
for i in range(1, 1 << 30):
    sys.stdout.write(("x" * 99 + "\\n") * 600)
    count.write_text(str(i))
"""


@contextmanager
def unread(kind: str) -> Iterator[int]:
    """The writing end of what nobody reads."""
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    try:
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


def start_unread(writer: int, *args: str, **options: Any) -> subprocess.Popen[str]:
    options = {"stderr": writer} | options
    return subprocess.Popen(
        [*LAUNCHER, *args], cwd=ROOT, stdout=writer, text=True, start_new_session=True, **options
    )


def written(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("count *"))]


def wait_until_stuck(folder: Path) -> None:
    """Until two loud ranks have been waiting for their reader for a while."""
    end = time.monotonic() + HANG_S
    before: list[str] = []
    while len(before) < 2 or before != written(folder) or not all(before):
        before = written(folder)
        assert time.monotonic() < end, before
        time.sleep(0.5)
    assert sum(map(int, before)) * 60000 < 4 << 20  # the rest is not in the launcher's memory


def test_a_time_out_does_not_wait_for_the_reader(script: Callable[..., str]) -> None:
    loud = script(LOUD)
    with unread("pipe") as pipe, unread("terminal") as terminal, open(os.devnull, "w") as nowhere:
        writers = (pipe, terminal, nowhere.fileno())  # the last takes more than can be shown
        launchers = [start_unread(w, "-n", "2", "--timeout", "2", loud) for w in writers]
        assert [launcher.wait(timeout=HANG_S) for launcher in launchers] == [124] * 3


def test_signals_do_not_wait_for_the_reader(script: Callable[..., str], tmp_path: Path) -> None:
    side_by_side(
        terminate_unread,
        [
            ("pipe", 2, script(LOUD, "pipe")),
            ("terminal", 2, script(LOUD, "terminal")),
            ("pipe", 1, script(LOUD, "escalation")),
        ],
    )


def terminate_unread(kind: str, times: int, path: str) -> None:
    """A job that is stuck ends at the second SIGTERM, or a while after the first."""
    with unread(kind) as writer:
        launcher = start_unread(writer, "-n", "2", path)
        wait_until_stuck(Path(path).parent)
        assert os.get_blocking(writer)  # whom it belongs to would be surprised
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        launcher.terminate()
        if times == 2:
            time.sleep(0.5)
            launcher.terminate()
        code = launcher.wait(timeout=HANG_S)
        assert code == 128 + (signal.SIGTERM if times == 2 else signal.SIGKILL)
        wait_until_gone([rank.pid for rank in ranks])


def test_the_user_need_not_wait_for_the_reader_of_the_rest(script: Callable[..., str]) -> None:
    text = "for _ in range(3): print('x' * 50000)\ntouch('done')"
    calls = [(signal.SIGTERM, script(text, "signal")), (None, script(text, "time-out"))]
    side_by_side(leave_the_rest, calls)


def leave_the_rest(end: signal.Signals | None, path: str) -> None:
    with unread("pipe") as writer:
        options = [] if end else ["--timeout", "3"]
        launcher = start_unread(writer, "-n", "1", *options, path, stderr=subprocess.PIPE)
        while not Path(path).with_name("done").exists():
            time.sleep(0.01)
        time.sleep(1.5)  # longer than the launcher waits for those who are not slow, but gone
        assert launcher.poll() is None
        if end:
            launcher.send_signal(end)
        _, stderr = launcher.communicate(timeout=HANG_S)
        assert launcher.returncode == (128 + end if end else 124)
        assert ("has not been read to the end" in stderr) == (end is None)


def test_a_slow_reader_gets_everything_in_order(script: Callable[..., str]) -> None:
    path = script(
        """
        for i in range(20000): sys.stdout.write(f"{rank}-{i} {'x' * 100}\\n")
        print("e" * 70000, file=sys.stderr)
        touch(f"done {rank}")
        if rank == 1:
            await_file("done 0")
            raise ValueError("the reason")
        """
    )
    launcher = subprocess.Popen(
        [*LAUNCHER, "-n", "2", path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launcher.stdout
    lines = []
    for i, line in enumerate(launcher.stdout):
        if i in (1000, 38000):  # while the ranks write, and when they have ended
            time.sleep(1.5)
        lines.append(line.rstrip())
    assert launcher.wait(timeout=HANG_S) == 1
    for rank in range(2):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] {rank}-")]
        assert mine == [f"[rank {rank}] {rank}-{i} {'x' * 100}" for i in range(20000)]
        assert f"[rank {rank}] {'e' * 70000}" in lines
    head = next(i for i, line in enumerate(lines) if line.startswith("sdp run: rank 1 "))
    assert head > 40000 and lines[-1] == "ValueError: the reason"
    assert not any(line.startswith("[rank") for line in lines[head:])


ENDLESS = """
def stop(*_):
    touch(f"stopped {rank}")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
touch(f"ready {rank}")
for other in (0, 1): await_file(f"ready {other}")
while True: print("y"); print("y", file=sys.stderr); time.sleep(0.01)
"""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_full_disk_ends_the_job(script: Callable[..., str], tmp_path: Path, name: str) -> None:
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open("/dev/full", "wb") as streams[name]:
        done = subprocess.run(
            [*LAUNCHER, "-n", "2", script(ENDLESS)], cwd=ROOT, text=True, timeout=HANG_S, **streams
        )
    assert done.returncode == 1
    assert {path.name for path in tmp_path.glob("stopped *")} == {"stopped 0", "stopped 1"}
    if name == "stdout":
        message = "sdp run: cannot write the ranks' output: No space left on device\n"
        assert done.stderr.endswith(message)
        assert "Traceback" not in done.stderr


def test_output_that_is_lost_at_the_end_is_a_failure(script: Callable[..., str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*LAUNCHER, "-n", "1", script("print('x')")],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANG_S,
        )
    assert done.returncode == 1
    assert done.stderr == "sdp run: cannot write the ranks' output: No space left on device\n"


def test_a_terminal_that_closes_ends_the_job(script: Callable[..., str], tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    launcher = subprocess.Popen(
        [*LAUNCHER, "-n", "2", script(ENDLESS)],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""  # the status is there as well
    while b"[rank " not in seen:
        seen += os.read(ours, 100)
    os.close(ours)
    assert launcher.wait(timeout=HANG_S) == 1
    assert len(list(tmp_path.glob("stopped *"))) == 2


def test_a_closed_stdout_is_dev_null(script: Callable[..., str]) -> None:
    done = launch("-n", "1", script("print('x'); sys.exit(3)"), preexec_fn=lambda: os.close(1))
    assert done.returncode == 3
    assert "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.parametrize("files", range(30, 35))
def test_ranks_that_cannot_be_started(script: Callable[..., str], files: int) -> None:
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
        (["--nproc-per-node", "2", "--hosts", "a,b", __file__], "--nproc-per-node is for this"),
        (["-n", "2"], "SCRIPT"),
    ],
)
def test_misuse_is_explained(args: list[str], message: str) -> None:
    done = launch(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_torch_recognises_the_job(script: Callable[..., str]) -> None:
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


def test_a_trace_is_left_also_by_a_job_that_fails(
    script: Callable[..., str], tmp_path: Path
) -> None:
    path = script(
        """
        from sdp_plugins.core import Group
        with Group.from_env() as group:
            group.all_reduce(bytearray(4))
            group.barrier()
        if rank == 1: sys.exit(7)
        """
    )
    folder = tmp_path / "traces"
    done = launch("-n", "2", "--trace", str(folder), path)
    assert done.returncode == 7
    last = done.stderr[done.stderr.rindex("sdp run: ") :]
    assert last.startswith(f"sdp run: {folder}/trace.json: open it in ")
    assert [line.split()[:2] for line in last.splitlines()[2:4]] == [["0", "2"], ["1", "2"]]
    names = [e["name"] for e in json.loads((folder / "trace.json").read_text())["traceEvents"]]
    assert names.count("all_reduce") >= 2 and names.count("barrier") >= 2
    done = launch("-n", "1", "--trace", str(folder), script("sys.exit(0)"))
    assert done.returncode == 0
    assert "there is no trace: " in done.stderr


IMPATIENT = """
import os, signal
from sdp_plugins.launch import cli
from sdp_plugins.trace import merge
def events(*_):
    os.kill(os.getpid(), signal.SIGINT)
    yield {}
merge._events = events
cli.main()
"""


def test_ctrl_c_while_traces_are_merged(script: Callable[..., str], tmp_path: Path) -> None:
    """The job has ended: its exit code counts, and what its ranks have left stays."""
    path = script(
        """
        from sdp_plugins.core import Group
        with Group.from_env() as group:
            group.barrier()
        sys.exit(7 * (rank == 1))
        """
    )
    folder = tmp_path / "traces"
    line = [sys.executable, "-c", IMPATIENT, "run", "-n", "2", "--trace", str(folder), path]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 7
    command = f"python -m sdp_plugins.trace merge {folder}"
    assert done.stderr.splitlines()[-1] == (
        f"sdp run: interrupted; the ranks' traces are not merged. Hint: {command}"
    )
    assert sorted(os.listdir(folder)) == ["rank-00000.json", "rank-00001.json"]


def test_a_trace_has_no_place(script: Callable[..., str], tmp_path: Path) -> None:
    """Told before a rank starts, in one line."""
    (tmp_path / "a file").write_text("mine")
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "trace.json").write_text("{}")
    path = script("touch('started')")
    for place, text in {
        tmp_path / "a file": "it is a file",
        Path("/proc/xx"): "No such file or directory",
        tmp_path / "profile": "trace.json there was written by something else",
    }.items():
        done = launch("-n", "2", "--trace", str(place), path)
        assert done.returncode == 2
        assert f"--trace {place}: {text}" in " ".join(done.stderr.split())
        assert "Hint: " in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "started").exists()
    assert (tmp_path / "a file").read_text() == "mine"
