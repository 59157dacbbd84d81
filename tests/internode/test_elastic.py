"""Elastic training on nodes that this machine plays, of which ranks and whole nodes are lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.cluster import PRELUDE, run
from tests.nodes import needs_nodes

pytestmark = needs_nodes

RANK = """
import os, signal, sys, torch
from torch.utils.data import TensorDataset
from sdp_plugins.torch import Elastic
rank, victims = int(os.environ["RANK"]), [int(word) for word in sys.argv[1].split(",")]
torch.manual_seed(rank)
model = torch.nn.Linear(100, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
elastic = Elastic(model, optimizer, timeout_s=60)
dataset = TensorDataset(torch.randn(80, 100, generator=torch.Generator().manual_seed(0)))
for epoch in elastic.epochs(2):
    for (x,) in elastic.loader(dataset, 4):
        if elastic.progress.steps == 3 and rank in victims: os.kill(os.getpid(), signal.SIGKILL)
        with elastic.step():
            elastic.model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
total = sum(parameter.double().sum().item() for parameter in model.parameters())
say(rank, elastic.numbers, elastic.progress[1:], elastic._group.core.nodes.members, total)
elastic.close()
"""
# torchrun ends all ranks of a node when one fails; these are none of its own.
NODE = """
import sys
node = int(os.environ["RANK"])
env = {name: text for name, text in os.environ.items() if not name.startswith("TORCHELASTIC_")}
env |= {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": str(node), "MASTER_PORT": "29600"}
ranks = [
    subprocess.Popen([sys.executable, sys.argv[1], sys.argv[2]],
                     env=env | {"RANK": str(2 * node + i), "LOCAL_RANK": str(i)})
    for i in range(2)
]
for rank in ranks:
    rank.wait()
"""


@pytest.mark.parametrize(
    ("victims", "nodes"),
    [
        pytest.param("0,1", "((0, 1),)", id="the node of the store"),
        pytest.param("1,2", "((0,), (1,))", id="a rank of each", marks=pytest.mark.long),
        pytest.param("3", "((0, 1), (2,))", id="one rank", marks=pytest.mark.long),
    ],
)
def test_the_others_go_on(tmp_path: Path, victims: str, nodes: str) -> None:
    (tmp_path / "rank.py").write_text(PRELUDE + RANK)
    (tmp_path / "node.py").write_text(PRELUDE + NODE)
    program = [str(tmp_path / "node.py"), str(tmp_path / "rank.py"), victims]
    done = run("--nodes", "2", "--ranks-per-node", "1", program=program)
    left = [rank for rank in range(4) if str(rank) not in victims.split(",")]
    lines = sorted(line for line in done.stdout.splitlines() if line[:1].isdigit())
    assert [line.split()[0] for line in lines] == list(map(str, left)), done.stdout + done.stderr
    assert len({line.split(maxsplit=1)[1] for line in lines}) == 1
    assert lines[0].split(maxsplit=1)[1].startswith(f"{left} (2, 0) {nodes} ")
