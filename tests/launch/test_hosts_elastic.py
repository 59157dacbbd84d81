"""`sdp run --elastic --hosts`, on nodes that this machine plays: ranks and whole hosts are lost."""

from __future__ import annotations

import json
import re
import signal
import sys

import pytest

from tests.launch.hosts import environment, run
from tests.launch.jobs import LAUNCHER, Done, Script
from tests.launch.two_nodes import LEFT, TWO_NODES
from tests.nodes import needs_nodes

pytestmark = needs_nodes

HOSTS = "node1:2,node0:2"  # not the launcher's first

# Trains for some epochs, and until as many ranks are there as wanted.
TRAINING = """
import socket, torch
from torch.utils.data import TensorDataset
from sdp_plugins.torch import Elastic
wanted, new = int(sys.argv[1]), "SDP_JOIN" not in os.environ
torch.manual_seed(rank)
model = torch.nn.Linear(100, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
elastic = Elastic(model, optimizer, timeout_s=60)
generator = torch.Generator().manual_seed(0)
dataset = TensorDataset(torch.randn(80, 100, generator=generator))
for epoch in elastic.epochs(100000):
    for (x,) in elastic.loader(dataset, 4):
        if elastic.progress.steps == 12 and new: happen()
        with elastic.step():
            elastic.model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.02)
    if epoch > 9 and elastic.world_size == wanted: break
total = sum(parameter.double().sum().item() for parameter in model.parameters())
print("done", elastic.numbers, socket.gethostname(), total, flush=True)
elastic.close()
"""


def job(options: list[str], path: str, *args: str, hosts: str = HOSTS) -> Done:
    lean = {"SDP_TIMEOUT_S": "60", "OMP_NUM_THREADS": "1"}
    line = [*TWO_NODES, *LAUNCHER, "--hosts", hosts, *options, path, *args]
    return run(line, environment(**lean))


def ended(done: Done, numbers: list[int]) -> list[str]:
    """The hosts on which the ranks have ended, by rank; they have the same weights."""
    assert done.returncode == 0, done.stderr
    found = sorted(line for line in done.stdout.splitlines() if " done " in line)
    words = [re.fullmatch(r"\[rank (\d)\] done (\[.*\]) (\w+) (\S+)", line) for line in found]
    groups = [word.groups() for word in words if word]
    assert [int(rank) for rank, *_ in groups] == numbers, done.stdout + done.stderr
    assert {(there, total) for _, there, _, total in groups} == {(str(numbers), groups[0][3])}
    return [host for _, _, host, _ in groups]


KILL = "def happen():\n    if rank == {}: os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=pytest.mark.long)])
def test_a_lost_rank_is_replaced_on_its_host(script: Script, victim: int) -> None:
    done = job(["--elastic", "2:4"], script(KILL.format(victim) + TRAINING), "4")
    assert ended(done, [0, 1, 2, 3]) == ["node1", "node1", "node0", "node0"]
    how = rf"rank {victim} \(pid \d+ on node{int(victim < 2)}\) has ended: killed by SIGKILL"
    assert re.search(rf"sdp run: {how}; starting another \(1 of 10\)", done.stderr)
    assert f"sdp run: rank {victim} takes part again, after " in done.stderr


NEVER = "def happen(): pass\n"
# Kills the process that ssh has started on its host, with the agents and the ranks.
HOST = """
def happen():
    import psutil
    if rank == {}: psutil.Process().parents()[1].kill()
"""


@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=pytest.mark.long)])
def test_a_lost_host_leaves_the_others(script: Script, victim: int) -> None:
    """Also that of rank 0, and of the store."""
    options = ["--elastic", "2:4", "--max-restarts", "0"]
    done = job(options, script(HOST.format(victim) + TRAINING), "2")
    node, lost, left = ("node1", "0, 1", [2, 3]) if victim == 0 else ("node0", "2, 3", [0, 1])
    assert ended(done, left) == [{"node1": "node0", "node0": "node1"}[node]] * 2
    assert (
        f"sdp run: host {node} is lost, and ranks {lost} with it; the others go on. "
        f"Hint: see whether {node} is up, and why. None start there again"
    ) in done.stderr
    assert "starting another" not in done.stderr
    assert "sdp run: the job goes on with 2 ranks" in done.stderr


@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=pytest.mark.long)])
def test_the_ranks_of_a_lost_host_return(script: Script, victim: int) -> None:
    done = job(["--elastic", "2:4"], script(HOST.format(victim) + TRAINING), "4")
    assert ended(done, [0, 1, 2, 3]) == ["node1", "node1", "node0", "node0"]
    lost = [0, 1] if victim == 0 else [2, 3]
    assert "the others go on. Hint: " in done.stderr
    assert "and why. Its ranks start again once it answers" in done.stderr
    for number in lost:
        again = rf"sdp run: rank {number} starts again on node\d \(\d of 10\)"
        assert re.search(again, done.stderr)
        assert f"sdp run: rank {number} takes part again, after " in done.stderr


# As a cable that is drawn: nobody gets a message about it.
CUT = """
def happen():
    if rank == 3: subprocess.run(["ip", "link", "set", "net0", "down"], check=True)
"""


@pytest.mark.long
def test_a_host_that_is_cut_off_leaves_the_others(script: Script) -> None:
    text = (
        (CUT + TRAINING).replace("timeout_s=60", "timeout_s=10").replace("epoch > 9", "epoch > 90")
    )
    done = job(["--elastic", "2:4"], script(text), "2", hosts="node0:2,node1:2")
    assert ended(done, [0, 1]) == ["node0", "node0"]
    assert "sdp run: rank 2 has been left out by the others; ending it" in done.stderr
    assert "sdp run: host node1 is lost, and ranks 2, 3 with it; the others go on" in done.stderr


def test_a_lost_host_leaves_too_few(script: Script) -> None:
    done = job(["--elastic", "3:4"], script(HOST.format(1) + TRAINING), "4")
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "sdp run: host node1 is lost, and ranks 0, 1 with it; fewer than 3 ranks are left. Hint: "
    )


@pytest.mark.parametrize("what", ["nothing", "SIGKILL", "SIGTERM"])
def test_no_process_is_left(script: Script, what: str) -> None:
    """Whether the job ends by itself, or its launcher is killed or told to end."""
    told = "    if epoch == 1: print('here')\n    for (x,)"
    text = NEVER + TRAINING.replace("    for (x,)", told)
    wanted = "4" if what == "nothing" else "5"
    number = what if what == "nothing" else str(int(signal.Signals[what]))
    inner = [sys.executable, script(LEFT), number, "4", *LAUNCHER, "--hosts", HOSTS]
    inner += ["--elastic", "2:4", script(text), wanted]
    done = run([*TWO_NODES, *inner], environment(RANK="0", OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    code, lines, there, left, errors = json.loads(done.stdout)
    assert [line.split()[-1] for line in lines] == ["here"] * 4
    assert there >= 4 * 2 + 2 and not left, left
    assert code == {"nothing": 0, "SIGKILL": -9, "SIGTERM": 143}[what], errors
