"""`sdp run --hosts`, under Open MPI and MPICH: on this machine, and on two nodes that it plays."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.launch.hosts import (
    SLEEP,
    environment,
    everything_below,
    on,
    one_line,
    run,
    started,
)
from tests.launch.jobs import LAUNCHER, Script
from tests.nodes import MPIS
from tests.processes import wait_until_gone
from tests.ranks import HANG_S
from tests.side_by_side import side_by_side

# ---- what the ranks get --------------------------------------------------------------------------


def test_what_ranks_find(mpi: str, script: Script) -> None:
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


def test_threads_and_a_hostfile(mpi: str, script: Script, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# this machine\nlocalhost slots=4\n")
    line = [*LAUNCHER, "--mpirun", f"{mpi}/bin/mpirun", "--hostfile", str(tmp_path / "hosts")]
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


def test_the_first_failure_ends_the_job(mpi: str, script: Script) -> None:
    lines = [(on(mpi, script(text)),) for text in ENDINGS]
    for done, (code, text) in zip(side_by_side(run, lines, 4), ENDINGS.values(), strict=True):
        assert done.returncode == code, done.stderr
        _, _, last = done.stderr.rpartition("sdp run: rank 1 (pid ")
        assert f" on {socket.gethostname()}) failed first" in last and text in last
        assert "[mpirun]" not in done.stderr and "[rank 0]" not in done.stderr


def test_the_time_is_up(mpi: str, script: Script) -> None:
    done = run(on(mpi, "--timeout", "20", script("if rank: time.sleep(600)")))
    assert done.returncode == 124
    assert done.stderr == (
        "sdp run: time-out reached; still running: rank 1\n"
        "sdp run: no rank on this machine has an open group\n"
    )


@pytest.mark.parametrize("ending", ["time-out", "SIGTERM"])
def test_the_end_does_not_wait_for_the_reader(mpi: str, script: Script, ending: str) -> None:
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
def test_a_signal_leaves_nothing(mpi: str, script: Script, number: int) -> None:
    with started(on(mpi, script(SLEEP))) as launcher:
        below = everything_below(launcher, 2)
        names = [process.name() for process in below]
        assert names.count("sleep") == 2 and len(below) >= 9  # with mpirun, agents and guardians
        launcher.send_signal(number)
        wait_until_gone(below)
        code = launcher.wait(timeout=HANG_S)
        assert code == (-number if number == signal.SIGKILL else 128 + number)


@pytest.mark.parametrize("what", ["agent", "mpirun"])
def test_what_is_no_rank_may_be_killed(mpi: str, script: Script, what: str) -> None:
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


def test_nobody_can_call_once_the_ranks_run(mpi: str, script: Script) -> None:
    with started(on(mpi, "--timeout", "20", script(SLEEP))) as launcher:
        everything_below(launcher, 2)
        connections = psutil.Process(launcher.pid).net_connections("tcp")
        assert psutil.CONN_LISTEN not in {connection.status for connection in connections}
        launcher.terminate()
        assert launcher.wait(timeout=HANG_S) == 143


def test_strangers_who_call_first_keep_nobody_out(script: Script, tmp_path: Path) -> None:
    """Agents find their place behind a crowd that says nothing, or nonsense."""
    crowd = """
    import socket, sys, time
    port = next(int(word.split("@")[0]) for word in sys.argv if word.endswith("@127.0.0.1"))
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
    line = [*LAUNCHER, "--mpirun", str(mpirun), "--hosts", "localhost:1", "--timeout", "30"]
    done = run([*line, script("print('began')")])
    assert (done.returncode, done.stdout) == (0, "[rank 0] began\n"), done.stderr


# ---- what keeps a job from starting --------------------------------------------------------------


def test_a_port_in_use(mpi: str, script: Script) -> None:
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
    done = run([*LAUNCHER, "--hosts", "localhost", "--mpirun", f"{tmp_path}/mpirun", "-m", "this"])
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert first == "[mpirun] a long story"
    assert last.endswith("(Open MPI 5.0) could not start the ranks: exit code 3; see above.")
