"""`sdp run --hosts`, under Open MPI and MPICH, on two nodes that this machine plays."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from tests.launch.hosts import SLEEP, environment, on, one_line, run
from tests.launch.jobs import Script
from tests.launch.two_nodes import LEFT, TWO_NODES
from tests.nodes import needs_nodes

NODES = "node1:2,node0:1"  # not the launcher's first


@needs_nodes
def test_all_reduce_over_two_nodes(mpi: str, script: Script) -> None:
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


def outcome(mpi: str, what: str, observer: str, path: str) -> tuple[int, list[str], str]:
    """The job's code, lines and errors; nothing of it is left."""
    inner = [sys.executable, observer, what, "3", *on(mpi, path, hosts=NODES)]
    done = run([*TWO_NODES, *inner], environment(RANK="0"))
    assert done.returncode == 0, done.stderr
    code, lines, there, left, errors = json.loads(done.stdout)
    assert there >= 3 * 3 and not left
    return code, lines, errors


@needs_nodes
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_signal_leaves_nothing_on_two_nodes(mpi: str, script: Script, number: int) -> None:
    code, lines, _ = outcome(mpi, str(int(number)), script(LEFT), script(SLEEP))
    assert lines == [f"[rank {rank}] here\n" for rank in range(3)]
    assert code == (-9 if number == signal.SIGKILL else 143)


@needs_nodes
def test_a_host_that_cannot_call_back(mpi: str, script: Script) -> None:
    """As behind a firewall: mpirun is reached, and we are not."""
    line = on(mpi, script("print('never')"), hosts="node1:1,node0:1")
    code = "import sys; from sdp_plugins.launch.hosts import addresses; "
    code += "addresses.launchers = lambda hosts: ['10.77.0.200']; "
    code += "from sdp_plugins.launch.cli import main; sys.argv[1:] = sys.argv[2:]; main()"
    text = one_line(run([*TWO_NODES, sys.executable, "-c", code, *line[2:]], environment()))
    assert "cannot reach sdp run on port" in text and "firewall" in text


@needs_nodes
def test_a_failure_on_the_other_node(mpi: str, script: Script) -> None:
    text = "print('here')\ntime.sleep(1)\nif rank == 1: raise ValueError('boom')\ntime.sleep(600)"
    code, _, errors = outcome(mpi, "nothing", script(LEFT), script(text))
    assert code == 1
    _, _, last = errors.rpartition("sdp run: rank 1 (pid ")
    assert "on node1) failed first" in last and last.rstrip().endswith("ValueError: boom")
