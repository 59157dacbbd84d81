"""`sdp run --hosts`, under Open MPI and MPICH: on this machine, and on two nodes that it plays."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.testbed import sandbox
from tests.processes import wait_until_gone
from tests.ranks import HANG_S
from tests.side_by_side import side_by_side

MPIS = {
    "Open MPI": os.environ.get("SDP_TEST_OPEN_MPI", ""),
    "MPICH": os.environ.get("SDP_TEST_MPI", ""),
}
ROOT = Path(__file__).parents[2]
SDP_RUN = [sys.executable, "-m", "sdp_plugins.launch", "run"]
TWO_NODES = sandbox.command([sys.executable, "-m", "tests.launch.two_nodes"])
reason = sandbox.reason_against()
needs_nodes = pytest.mark.skipif(bool(reason), reason=reason)

HEADER = """
import json, os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
"""
Done = subprocess.CompletedProcess[str]


@pytest.fixture(params=MPIS)
def mpi(request: pytest.FixtureRequest) -> str:
    """An MPI's prefix."""
    prefix = MPIS[request.param]
    if not prefix:
        pytest.skip(f"no variable names an {request.param}")
    return prefix


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script."""

    def write(text: str) -> str:
        path = tmp_path / f"script {len(list(tmp_path.iterdir()))}.py"
        path.write_text(HEADER + textwrap.dedent(text))
        return str(path)

    return write


def on(mpi: str, *args: str, hosts: str = "localhost:2") -> list[str]:
    return [*SDP_RUN, "--mpirun", f"{mpi}/bin/mpirun", "--hosts", hosts, *args]


def environment(mpi: str = "", **more: str) -> dict[str, str]:
    """Without threads that were asked for, and mpi4py only where an MPI is given."""
    base = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    if mpi:
        base["PYTHONPATH"] = str(next(Path(mpi).glob("lib/python*/site-packages")))
        libraries = (Path(mpi, "lib", name) for name in ("libmpi.so.40", "libmpi.so.12"))
        base["MPI4PY_LIBMPI"] = str(next(path for path in libraries if path.exists()))
    return base | {"PYTHONWARNINGS": "ignore"} | more


def run(line: list[str], env: dict[str, str] | None = None, **options: object) -> Done:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        line,
        cwd=ROOT,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        **options,
    )


@contextmanager
def started(line: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a session of its own, so that signals reach it alone."""
    pipe = subprocess.PIPE
    launcher = subprocess.Popen(
        line,
        cwd=ROOT,
        env=environment(),
        stdout=pipe,
        stderr=pipe,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def everything_below(launcher: subprocess.Popen[str], lines: int) -> list[psutil.Process]:
    """All that the launcher has started, once its ranks have printed so many lines."""
    assert launcher.stdout
    for _ in range(lines):
        assert launcher.stdout.readline()
    return psutil.Process(launcher.pid).children(recursive=True)


# ---- what the ranks get --------------------------------------------------------------------------


def test_what_ranks_find(mpi: str, script: Callable[[str], str]) -> None:
    path = script(
        """
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"]
        names += ["OMP_NUM_THREADS", "SDP_LAUNCH_TOKEN", "HERE"]
        cores = len(os.sched_getaffinity(0))
        port = os.environ["MASTER_PORT"]
        given = {name: os.environ.get(name) for name in names}
        print(json.dumps([given, sys.argv[1:], sys.stdin.read(), cores, port]))
        """
    )
    # To mpirun a colon begins another program.
    arguments = ["a b", "", "--", "-n", "'\"", "*", ":", "-n", "1", "ls", "ü\n", "x" * 9000]
    outer = {"RANK": "7", "WORLD_SIZE": "9", "OMPI_COMM_WORLD_RANK": "5", "PMI_RANK": "4"}
    line = on(mpi, "-x", "HERE=x y", "--no-prefix", path, *arguments)
    done = run(line, environment(**outer), input="nobody's")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found = [json.loads(text) for text in done.stdout.splitlines()]
    found.sort(key=lambda one: one[0]["RANK"])
    for rank, (given, argv, stdin, cores, port) in enumerate(found):
        assert given == {
            **{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "NODE_RANK": "0"},
            **{"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "HERE": "x y"},
            **{"OMP_NUM_THREADS": None, "SDP_LAUNCH_TOKEN": None},
        }
        assert argv == arguments
        assert stdin == ""
        assert cores == len(os.sched_getaffinity(0))
        assert port == found[0][4]


def test_threads_and_a_hostfile(mpi: str, script: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# this machine\nlocalhost slots=4\n")
    line = [*SDP_RUN, "--mpirun", f"{mpi}/bin/mpirun", "--hostfile", str(tmp_path / "hosts")]
    path = script("print(os.environ['OMP_NUM_THREADS'], os.environ['WORLD_SIZE'])")
    done = run([*line, "-n", "3", "--threads", "2", path])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] 2 3" for r in range(3)]


# ---- how jobs end --------------------------------------------------------------------------------

ENDINGS = {
    "if rank == 1: sys.exit(7)\ntime.sleep(600)": (7, "exit code 7."),
    "if rank == 1: {}['key']\ntime.sleep(600)": (1, "KeyError: 'key'"),
    "if rank == 1: import nothing_of_that_name\ntime.sleep(600)": (1, "No module named 'nothing_"),
    "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(600)": (137, "killed by SIGKILL"),
}


def test_the_first_failure_ends_the_job(mpi: str, script: Callable[[str], str]) -> None:
    lines = [(on(mpi, script(text)),) for text in ENDINGS]
    for done, (code, text) in zip(side_by_side(run, lines, 4), ENDINGS.values(), strict=True):
        assert done.returncode == code, done.stderr
        _, _, last = done.stderr.rpartition("sdp run: rank 1 (pid ")
        assert f" on {socket.gethostname()}) failed first" in last and text in last
        assert "[mpirun]" not in done.stderr and "[rank 0]" not in done.stderr


def test_the_time_is_up(mpi: str, script: Callable[[str], str]) -> None:
    done = run(on(mpi, "--timeout", "20", script("if rank: time.sleep(600)")))
    assert done.returncode == 124
    assert done.stderr == (
        "sdp run: the time is up; still running: rank 1\n"
        "sdp run: no rank on this machine has an open group\n"
    )


SLEEP = """
    subprocess.Popen(["sleep", "600"])
    print("here")
    while True: time.sleep(0.1)
"""


@pytest.mark.parametrize("ending", ["time-out", "SIGTERM"])
def test_the_end_does_not_wait_for_the_reader(
    mpi: str, script: Callable[[str], str], ending: str
) -> None:
    """Nor is its exit code another when nobody reads what the ranks have printed."""
    flood = script("print('begun', flush=True)\nwhile True: print('x' * 1000)")
    limit = ["--timeout", "3"] if ending == "time-out" else []
    with started(on(mpi, *limit, flood)) as launcher:
        assert launcher.stdout
        launcher.stdout.readline()
        if ending == "SIGTERM":
            launcher.terminate()
        assert launcher.wait(timeout=HANG_S) == (124 if ending == "time-out" else 143)
        launcher.stdout.read()
        assert launcher.stderr
        assert "Traceback" not in launcher.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(mpi: str, script: Callable[[str], str], number: int) -> None:
    with started(on(mpi, script(SLEEP))) as launcher:
        below = everything_below(launcher, 2)
        names = [process.name() for process in below]
        assert names.count("sleep") == 2 and len(below) >= 9  # with mpirun, agents and guardians
        launcher.send_signal(number)
        wait_until_gone(below)
        code = launcher.wait(timeout=HANG_S)
        assert code == (-number if number == signal.SIGKILL else 128 + number)


@pytest.mark.parametrize("what", ["agent", "mpirun"])
def test_what_is_no_rank_may_be_killed(mpi: str, script: Callable[[str], str], what: str) -> None:
    """Nobody tells then how the ranks have ended."""
    with started(on(mpi, script(SLEEP))) as launcher:
        below = everything_below(launcher, 2)
        sleep = next(process for process in below if process.name() == "sleep")
        agent = sleep.parents()[1]
        (mpirun,) = (p for p in psutil.Process(launcher.pid).children() if len(p.children()) > 0)
        {"agent": agent, "mpirun": mpirun}[what].kill()
        _, errors = launcher.communicate(timeout=HANG_S)
        wait_until_gone(below)
    assert launcher.returncode in (1, 9, 137)  # mpirun's: MPICH's gives the signal as it is
    last = errors.splitlines()[-1]
    assert last.startswith("sdp run: ") and "Hint: " in last
    assert "ended without an exit code" in last or (what == "mpirun" and "mpirun has ended" in last)


def test_nobody_can_call_once_the_ranks_run(mpi: str, script: Callable[[str], str]) -> None:
    with started(on(mpi, "--timeout", "20", script(SLEEP))) as launcher:
        everything_below(launcher, 2)
        connections = psutil.Process(launcher.pid).net_connections("tcp")
        assert psutil.CONN_LISTEN not in {connection.status for connection in connections}
        launcher.terminate()
        assert launcher.wait(timeout=HANG_S) == 143


def test_strangers_who_call_first_keep_nobody_out(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    """Agents find their place behind a crowd that says nothing, or nonsense."""
    crowd = """
    import socket, sys, time
    port = int(sys.argv[sys.argv.index("--launcher") + 1].split("@")[0])
    calls = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for call in calls[::2]:
        call.sendall(b"H" + (200000).to_bytes(4, "big") + b"[" * 4000)
    time.sleep(0.3)
    """
    (tmp_path / "crowd.py").write_text(textwrap.dedent(crowd))
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0.0"; exit; fi\n'
        f'{sys.executable} "{tmp_path}/crowd.py" "$@" || exit\n'
        'while [ "$1" != -n ]; do shift; done; shift 2\n'
        "export OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0\n"
        'export OMPI_COMM_WORLD_LOCAL_SIZE=1; exec "$@"\n'
    )
    mpirun.chmod(0o755)
    line = [*SDP_RUN, "--mpirun", str(mpirun), "--hosts", "localhost:1", "--timeout", "30"]
    done = run([*line, script("print('began')")])
    assert (done.returncode, done.stdout) == (0, "[rank 0] began\n"), done.stderr


# ---- what keeps a job from starting --------------------------------------------------------------


def one_line(done: Done) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("sdp run: ") and done.stderr.count("\n") == 1, done.stderr
    assert "Hint: " in done.stderr
    return done.stderr


def test_a_port_in_use(mpi: str, script: Callable[[str], str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        text = one_line(run(on(mpi, "--master-port", str(port), script("print('never')"))))
    assert f"MASTER_PORT {port} on " in text and "Address already in use" in text


SSH = {
    "ssh: connect to host 192.0.2.1 port 22: Connection refused": "start sshd there",
    "Host key verification failed.": "ssh-keyscan 192.0.2.1",
    "root@192.0.2.1: Permission denied (publickey).": "ssh-copy-id 192.0.2.1",
    f"sh: 1: {sys.executable}: not found": "every host needs the same Python",
    "ModuleNotFoundError: No module named 'sdp_plugins'": "has no sdp-plugins",
    "something else": "something else",
}


@pytest.mark.parametrize("words", SSH)
def test_a_host_that_cannot_be_used(mpi: str, tmp_path: Path, words: str) -> None:
    (tmp_path / "shell").write_text(f'#!/bin/sh\necho "{words}" >&2\nexit 255\n')
    (tmp_path / "shell").chmod(0o755)
    names = ("PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC")
    env = environment(**dict.fromkeys(names, str(tmp_path / "shell")))
    done = run(on(mpi, "-m", "platform", hosts="localhost:1,192.0.2.1:1"), env)
    assert SSH[words] in one_line(done) and "192.0.2.1" in done.stderr


def test_two_mpis(mpi: str) -> None:
    """The ranks' mpi4py loads another one's library than that of mpirun."""
    if not all(MPIS.values()):
        pytest.skip("it takes two")
    (other,) = set(MPIS.values()) - {mpi}
    text = one_line(run(on(mpi, "-m", "platform"), environment(other)))
    assert "two MPIs: " in text and all(name in text for name in MPIS)


def test_an_mpirun_that_fails(tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo "mpirun (Open MPI) 5.0"\n'
        "echo 'a long story'\nexit 3\n"
    )
    (tmp_path / "mpirun").chmod(0o755)
    done = run([*SDP_RUN, "--hosts", "localhost", "--mpirun", f"{tmp_path}/mpirun", "-m", "this"])
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert first == "[mpirun] a long story"
    assert last.endswith("(Open MPI 5.0) could not start the ranks: exit code 3; see above.")


# ---- two nodes -----------------------------------------------------------------------------------

NODES = "node1:2,node0:1"  # not the launcher's first


@needs_nodes
def test_all_reduce_over_two_nodes(mpi: str, script: Callable[[str], str]) -> None:
    path = script(
        """
        import socket, torch, torch.distributed as dist
        dist.init_process_group("smddp")
        one = torch.ones(3)
        dist.all_reduce(one)
        place = [os.environ[name] for name in ("LOCAL_RANK", "NODE_RANK", "MASTER_ADDR")]
        print(socket.gethostname(), *place, f"{one.sum():.0f}", "mpi4py.MPI" in sys.modules)
        dist.destroy_process_group()
        """
    )
    lean = {"SDP_TIMEOUT_S": "30", "OMP_NUM_THREADS": "1"}
    done = run([*TWO_NODES, *on(mpi, path, hosts=NODES)], environment(mpi, **lean))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[rank 0] node1 0 0 10.77.0.2 9 True",
        "[rank 1] node1 1 0 10.77.0.2 9 True",
        "[rank 2] node0 0 1 10.77.0.2 9 True",
    ]


# Runs on the first node: starts a job, does something to it, and prints what is left of it.
LEFT = """
    import psutil
    def names():
        found = (p for p in psutil.process_iter(["name", "cmdline", "status"]))
        return sorted(" ".join(p.info["cmdline"] or [p.info["name"]]) for p in found
                      if p.info["status"] != "zombie" and p.pid not in before)
    before = {p.pid for p in psutil.process_iter()}
    job = subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = sorted(job.stdout.readline() for _ in range(3))
    there = len(names())
    if sys.argv[1] != "nothing": job.send_signal(int(sys.argv[1]))
    end = time.monotonic() + 200
    _, errors = job.communicate()
    while (left := names()) and time.monotonic() < end: time.sleep(0.02)
    print(json.dumps([job.returncode, lines, there, left, errors]))
"""


def outcome(mpi: str, what: str, observer: str, path: str) -> tuple[int, list[str], str]:
    """The job's code, lines and errors; nothing of it is left."""
    inner = [sys.executable, observer, what, *on(mpi, path, hosts=NODES)]
    done = run([*TWO_NODES, *inner], environment(RANK="0"))
    assert done.returncode == 0, done.stderr
    code, lines, there, left, errors = json.loads(done.stdout)
    assert there >= 3 * 3 and not left
    return code, lines, errors


@needs_nodes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_leaves_nothing_on_two_nodes(
    mpi: str, script: Callable[[str], str], number: int
) -> None:
    code, lines, _ = outcome(mpi, str(int(number)), script(LEFT), script(SLEEP))
    assert lines == [f"[rank {rank}] here\n" for rank in range(3)]
    assert code == (-9 if number == signal.SIGKILL else 143)


@needs_nodes
def test_a_host_that_cannot_call_back(mpi: str, script: Callable[[str], str]) -> None:
    """As behind a firewall: mpirun is reached, and we are not."""
    line = on(mpi, script("print('never')"), hosts="node1:1,node0:1")
    code = "import sys; from sdp_plugins.launch.hosts import addresses; "
    code += "addresses.launchers = lambda hosts: ['10.77.0.200']; "
    code += "from sdp_plugins.launch.cli import main; sys.argv[1:] = sys.argv[2:]; main()"
    text = one_line(run([*TWO_NODES, sys.executable, "-c", code, *line[2:]], environment()))
    assert "cannot reach sdp run on port" in text and "firewall" in text


@needs_nodes
def test_a_failure_on_the_other_node(mpi: str, script: Callable[[str], str]) -> None:
    text = "print('here')\ntime.sleep(1)\nif rank == 1: raise ValueError('boom')\ntime.sleep(600)"
    code, _, errors = outcome(mpi, "nothing", script(LEFT), script(text))
    assert code == 1
    _, _, last = errors.rpartition("sdp run: rank 1 (pid ")
    assert "on node1) failed first" in last and last.rstrip().endswith("ValueError: boom")
