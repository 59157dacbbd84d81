"""Nodes that this machine plays, and jobs on them; skipped where there can be none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.testbed import sandbox
from benchmarks.testbed.network import CONGESTION_CONTROL
from tests.benchmarks.cluster import (
    LIMIT_S,
    LINK_DOWN,
    Script,
    cluster,
    environment,
    run,
)
from tests.nodes import MPI, needs_mpi, needs_nodes

pytestmark = needs_nodes


def namespaces() -> set[str]:
    """What could stay behind: network namespaces, links, mounts."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in links.stdout.splitlines()}
    names |= set(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else set()
    mounts = Path("/proc/mounts").read_text()
    return names | {line for line in mounts.splitlines() if "sdp-cluster" in line}


def test_a_command_runs_on_all_ranks(script: Script) -> None:
    path = script(
        """
        import socket
        speed = subprocess.run(["tc", "qdisc"], capture_output=True, text=True).stdout
        other = "node0" if socket.gethostname() == "node1" else "node1"
        with socket.socket() as link:
            link.connect_ex((other, 9))  # where nobody listens
            name = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        say(os.environ["RANK"], socket.gethostname(), "rate 500Mbit" in speed,
              socket.gethostbyname("node1"), name.strip(b"\\0").decode())
        """
    )
    before = namespaces()
    options = ("--nodes", "2", "--ranks-per-node", "2", "--gbit", "0.5")
    done = run(*options, program=[path])
    assert done.returncode == 0, done.stderr
    lines, control = zip(
        *(line.rsplit(" ", 1) for line in sorted(done.stdout.splitlines())), strict=True
    )
    assert lines == (
        "0 node0 True 10.77.0.2",
        "1 node0 True 10.77.0.2",
        "2 node1 True 10.77.0.2",
        "3 node1 True 10.77.0.2",
    )
    # Whatever this machine's own is: links are shared fairly, where BBR finds out only slowly that
    # others have left.
    assert len(set(control)) == 1 and control[0] in CONGESTION_CONTROL, control
    assert namespaces() == before


def test_its_status_is_the_programs(script: Script) -> None:
    path = script("import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)")
    assert run(program=[path]).returncode != 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_behind(script: Script, how: signal.Signals, tmp_path: Path) -> None:
    path = script("import time; say('here'); time.sleep(300)")
    before = namespaces()
    line = cluster(program=[path])
    (temporary := tmp_path / "tmp").mkdir()
    env = environment() | {"TMPDIR": str(temporary)}
    with subprocess.Popen(
        line, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "here\n"
        family = psutil.Process(started.pid).children(recursive=True)
        assert len(family) >= 4  # unshare, the command again, two torchruns and their ranks
        started.send_signal(how)
        started.wait(LIMIT_S)
    assert not psutil.wait_procs(family, LIMIT_S)[1]
    end = time.monotonic() + LIMIT_S
    while namespaces() != before and time.monotonic() < end:
        time.sleep(0.05)
    assert namespaces() == before
    assert not list(temporary.iterdir())


def test_there_may_be_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in sandbox.reason_against()
    with pytest.raises(OSError, match="need root"):
        sandbox.enter()


# ---- torchrun -----------------------------------------------------------------------------------


def test_a_link_goes_down_under_torchrun(script: Script) -> None:
    setup = """
    import torch, torch.distributed as dist
    dist.init_process_group("smddp")
    group = dist.group.WORLD._group
    data = torch.zeros(200_000)
    reduce = lambda: dist.all_reduce(data)
    reduce()
    dist.group.WORLD.set_timeout(timedelta(seconds=3))
    """
    path = script(LINK_DOWN.format(setup=setup.strip(), patience_s=100))
    done = run("--nodes", "2", "--ranks-per-node", "1", program=[path])
    said = [Path(path).with_name(f"said by {rank}").read_text() for rank in range(2)]
    # Who hears of it second may find the connection closed.
    expected = {"CollectiveTimeoutError True", "PeerLostError True"}
    assert set(said) <= expected, done.stdout + done.stderr


@pytest.mark.parametrize(
    "launcher", ["torchrun", pytest.param("mpirun", marks=[needs_mpi, pytest.mark.long])]
)
def test_lightning_on_two_nodes(script: Script, launcher: str) -> None:
    path = script(
        """
        import lightning, torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader, TensorDataset

        class Model(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(10, 1)
            def training_step(self, batch, index):
                return self.layer(batch[0]).square().mean()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.01)

        torch.manual_seed(0)
        trainer = lightning.Trainer(
            num_nodes=2, devices=1, accelerator="cpu", strategy="smddp", max_epochs=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Model()
        trainer.fit(model, DataLoader(TensorDataset(torch.randn(32, 10)), batch_size=4))
        total = sum(parameter.sum() for parameter in model.parameters())
        totals = [torch.zeros(()) for _ in range(2)]
        dist.all_gather(totals, total.detach())
        group = dist.group.WORLD._group
        say(trainer.global_rank, trainer.node_rank, group.nodes.count, group._network.name,
              bool(totals[0] == totals[1]))
        """
    )
    options = ("--mpi-prefix", MPI) if launcher == "mpirun" else ()
    done = run("--nodes", "2", "--launcher", launcher, *options, program=[path])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line[:1].isdigit())
    name = "MPI" if launcher == "mpirun" else "gloo"
    assert lines == [f"0 0 2 {name} True", f"1 1 2 {name} True"]


@pytest.mark.long
def test_a_step_across_nodes(tmp_path: Path) -> None:
    """Shards give DDP's weights, and send as much."""
    line = [sys.executable, "-m", "benchmarks", "step", "--nodes", "2", "--layers", "1"]
    line += ["--tokens", "4", "--repeats", "1", "--steps", "1", "--optimizer", "sgd"]
    line += ["--variants", "smddp,sharded", "--json", str(tmp_path / "found")]
    done = subprocess.run(
        line, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert "bitwise those of smddp" in done.stdout, done.stdout + done.stderr
    found = json.loads((tmp_path / "found").read_text())["measurements"]
    sent = {each["variant"]: each["sent"] for each in found}
    assert sent["sharded"] == pytest.approx(sent["smddp"], rel=0.05)
    assert sent["smddp"] == pytest.approx(1.0, rel=0.1)
