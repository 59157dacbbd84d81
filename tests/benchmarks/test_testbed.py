"""Nodes that this machine plays, and jobs on them; skipped where there can be none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.testbed import sandbox
from benchmarks.testbed.network import CONGESTION_CONTROL

reason = sandbox.reason_against()
pytestmark = pytest.mark.skipif(bool(reason), reason=reason)

MPI = os.environ.get("SDP_TEST_MPI", "")
"""Where an MPI and mpi4py are installed, apart from everything else."""
OPEN_MPI = os.environ.get("SDP_TEST_OPEN_MPI", "")
"""The same for Open MPI, which differs most from the others."""
needs_mpi = pytest.mark.skipif(not MPI, reason="SDP_TEST_MPI names no MPI")
needs_open_mpi = pytest.mark.skipif(not OPEN_MPI, reason="SDP_TEST_OPEN_MPI names no MPI")
LIMIT_S = 250.0

PRELUDE = """
import os, subprocess
def say(*words):  # in one piece, whoever else writes
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def end_launchers():  # which would wait for the nodes that they cannot reach any more
    subprocess.run(["pkill", "-KILL", "-f", "mpiexec|torch.distributed.run"])
"""
Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a program; returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(PRELUDE + textwrap.dedent(text))
        return str(path)

    return write


def cluster(*options: str, program: Sequence[str]) -> list[str]:
    bench = [sys.executable, "-m", "benchmarks", "cluster"]
    return [*bench, *options, "--", sys.executable, *program]


def environment(mpi: str = MPI) -> dict[str, str]:
    """Ranks find mpi4py where the MPI is, and the tests' modules here."""
    root = Path(__file__).parents[2]
    packages = [str(path) for path in Path(mpi).glob("lib/python*/site-packages")] if mpi else []
    lean = root / "tests" / "lightning" / "lean"
    path = os.pathsep.join([str(lean), str(root), *packages])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def run(*options: str, program: Sequence[str], mpi: str = MPI) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        cluster(*options, program=program),
        env=environment(mpi),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def mpirun(program: Sequence[str], layout: tuple[int, int] = (2, 2), mpi: str = MPI) -> list[str]:
    """Run a program by mpirun; its lines, sorted, if it succeeded."""
    nodes, ranks = layout
    place = ("--nodes", str(nodes), "--ranks-per-node", str(ranks))
    done = run(*place, "--launcher", "mpirun", "--mpi-prefix", mpi, program=program, mpi=mpi)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


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


# ---- MPI ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mpi",
    [
        pytest.param(MPI, marks=needs_mpi, id="mpich"),
        pytest.param(OPEN_MPI, marks=needs_open_mpi, id="openmpi"),
    ],
)
def test_core_over_mpi(script: Script, mpi: str) -> None:
    """Every collective; groups of groups; MPI is ours to start, and to end."""
    path = script(
        """
        import sys
        import numpy as np
        from sdp_plugins.core import Group
        from tests.core.test_programs import Program

        assert "mpi4py" not in sys.modules
        with Group.from_env(timeout_s=30) as group:
            program = Program(group, 2)
            program.all_reduce_in_place = program.all_reduce
            wrong = program.run()
            odd = group.new_group([1, 3])
            if odd is not None:
                data = np.full(100_000, group.rank, np.float32)
                odd.all_reduce(data)
                wrong += [] if (data == 4).all() else ["sub-group"]
                odd.close()
            large = np.arange(7_000_000, dtype=np.float32) % 1000 + group.rank
            group.all_reduce(large)
            right = (np.arange(7_000_000) % 1000) * 4 + 6
            wrong += [] if np.array_equal(large, right) else ["large"]
        say(group.rank, group.nodes.members, wrong, "mpi4py.MPI" in sys.modules)
        """
    )
    expected = [f"{rank} ((0, 1), (2, 3)) [] True" for rank in range(4)]
    assert mpirun([path], mpi=mpi) == expected


@pytest.mark.parametrize(
    ("mpi", "layout"),
    [
        pytest.param(MPI, (3, 1), marks=needs_mpi, id="mpich-3x1"),
        pytest.param(OPEN_MPI, (2, 2), marks=needs_open_mpi, id="openmpi-2x2"),
    ],
)
def test_messages_over_mpi(script: Script, mpi: str, layout: tuple[int, int]) -> None:
    """Many of them received from any rank; some receives are left when the group is closed."""
    path = script(
        """
        import threading
        import numpy as np
        from sdp_plugins.core import Group
        from tests.internode.random_messages import TAGS, run_round

        with Group.from_env(timeout_s=30) as group:
            for number in range(6):
                run_round(group, number, 5)
            elsewhere = (group.rank + group.world_size // 2) % group.world_size
            for source in (None, elsewhere):
                waiting = group.recv(np.zeros(1), source, 7 * TAGS, async_op=True)
            group.barrier()
        left = [t.name for t in threading.enumerate() if t.name.startswith("sdp-recv")]
        say(group.rank, "the group is closed" in str(waiting.exception()), left)
        """
    )
    nodes, ranks = layout
    assert mpirun([path], layout, mpi) == [f"{rank} True []" for rank in range(nodes * ranks)]


@needs_mpi
def test_one_node_does_not_touch_mpi(script: Script) -> None:
    path = script(
        """
        import sys
        import numpy as np
        from sdp_plugins.core import Group

        with Group.from_env(timeout_s=30) as group:
            data = np.ones(1000)
            group.all_reduce(data)
        say(group.rank, data[0], "mpi4py.MPI" in sys.modules)
        """
    )
    assert mpirun([path], layout=(1, 2)) == ["0 2.0 False", "1 2.0 False"]


@needs_mpi
@pytest.mark.parametrize("level", ["single", "serialized", "multiple"])
def test_mpi_that_the_program_has_started(script: Script, level: str) -> None:
    path = script(
        f"""
        import mpi4py
        mpi4py.rc.thread_level = {level!r}
        from mpi4py import MPI
        import numpy as np
        from sdp_plugins.core import Group, RendezvousError

        try:
            with Group.from_env(timeout_s=30) as group:
                data = np.ones(100_000)
                group.all_reduce(data)
                say(group.rank, data[0])
        except RendezvousError as error:
            say("refused", "MPI_THREAD_SERIALIZED" in str(error))
        MPI.COMM_WORLD.Barrier()  # it is the program's still
        """
    )
    lines = mpirun([path], layout=(2, 1))
    # A library may give more than was asked for.
    assert lines == ["0 2.0", "1 2.0"] or (level == "single" and lines == ["refused True"] * 2)


@needs_mpi
def test_torch_over_mpi(script: Script) -> None:
    """A job that mpirun has started takes MPI; ranks that are told of an exception end in order."""
    path = script(
        """
        import os, sys
        from datetime import timedelta
        import torch
        import torch.distributed as dist

        rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
        os.environ.update(MASTER_ADDR="node0", MASTER_PORT="29400")
        dist.init_process_group("smddp", rank=rank, world_size=size, timeout=timedelta(seconds=20))
        data = torch.ones(300_000)
        dist.all_reduce(data)
        assert (data == size).all()
        say(rank, type(dist.group.WORLD._group._network).__name__)
        try:
            if rank == 3:
                raise KeyError("no such file")
            dist.all_reduce(data)
        except KeyError as error:
            dist.group.WORLD.abort(error)
        except RuntimeError as error:
            text = str(error)
            say(rank, "KeyError: 'no such file'" in text, "rank 3" in text)
        """
    )
    options = ("--nodes", "2", "--ranks-per-node", "2", "--launcher", "mpirun")
    done = run(*options, "--mpi-prefix", MPI, program=[path])
    lines = sorted(done.stdout.splitlines())
    assert lines == [
        "0 MpiNetwork",
        "0 True True",
        "1 MpiNetwork",
        "1 True True",
        "2 MpiNetwork",
        "2 True True",
        "3 MpiNetwork",
    ], done.stdout + done.stderr


@needs_mpi
def test_ends_of_programs_over_mpi(script: Script) -> None:
    """With a receive that nobody answers; with a forked child; in a job of two MPI worlds."""
    path = script(
        """
        import sys
        import numpy as np
        from sdp_plugins.core import Group

        group = Group.from_env(timeout_s=20)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        status = os.waitpid(child, 0)[1]
        group.barrier()
        if group.rank == 0:
            group.recv(np.zeros(5), 1, async_op=True)
        say(group.rank, status)
        """
    )
    assert mpirun([path], layout=(2, 1)) == ["0 0", "1 0"]


@needs_mpi
def test_an_exception_on_a_node_of_its_own(script: Script) -> None:
    path = script(
        """
        import numpy as np
        from sdp_plugins.core import Group

        group = Group.from_env(timeout_s=40)
        group.barrier()
        if group.rank == 1:
            raise KeyError("no such file")
        try:
            group.barrier()
        except RuntimeError as error:
            say("KeyError: 'no such file'" in str(error))
        """
    )
    options = ("--nodes", "2", "--launcher", "mpirun", "--mpi-prefix", MPI)
    done = run(*options, program=[path])
    assert done.returncode != 0
    assert "True" in done.stdout.splitlines(), done.stdout + done.stderr


@needs_mpi
def test_ranks_of_different_mpi_jobs(script: Script) -> None:
    """torchrun's ranks are each alone in MPI's world: sums would be of one's own values."""
    path = script(
        """
        import torch.distributed as dist
        from sdp_plugins.core import Group, RendezvousError
        from sdp_plugins.core.internode.mpi import MpiNetwork
        from sdp_plugins.torch.store import TorchStore

        rank = int(os.environ["RANK"])
        store = dist.TCPStore("node0", 29400, 2, rank == 0)
        try:
            Group.from_store(TorchStore(store), rank, 2, network=MpiNetwork(), timeout_s=20)
        except RendezvousError as error:
            say("not of one MPI job" in str(error))
        store.set(f"done{rank}", "")
        store.get(f"done{1 - rank}")
        """
    )
    library = str(next(Path(MPI).glob("lib/libmpi.so.*"), ""))
    done = subprocess.run(
        cluster("--nodes", "2", program=[path]),
        env=environment() | {"MPI4PY_LIBMPI": library},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stdout.splitlines() == ["True", "True"], done.stdout + done.stderr


def test_mpi_is_asked_for_where_torchrun_starts(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDP_INTERNODE", "mpi")
    path = script(
        """
        import torch.distributed as dist
        from sdp_plugins.core import RendezvousError
        try:
            dist.init_process_group("smddp")
        except RendezvousError as error:
            say("MPI" in str(error), "Hint: " in str(error))
        """
    )
    done = run("--nodes", "2", program=[path])
    assert done.stdout.splitlines() == ["True True"] * 2, done.stdout + done.stderr


# `setup` sets a time-out when the ranks have met. Each rank then waits until the other has said it.
LINK_DOWN = """
    import os, pathlib, subprocess, time
    from datetime import timedelta
    {setup}
    said = [pathlib.Path(__file__).with_name(f"said {{rank}}") for rank in range(2)]
    try:
        for turn in range(1000):
            if turn == 3 and group.node_rank == 1 and group.local_rank == 0:
                subprocess.run(["ip", "link", "set", "net0", "down"], check=True)
            reduce()
    except RuntimeError as error:
        there = "node0" if group.node_rank else "node1"
        say(group.rank, type(error).__name__, f"on {{there}}" in str(error))
    said[group.rank].touch()
    end = time.monotonic() + {patience_s}
    while not said[1 - group.rank].exists() and time.monotonic() < end: time.sleep(0.01)
    end_launchers()
    os._exit(0)
"""


@needs_mpi
def test_a_link_goes_down_under_mpi(script: Script) -> None:
    setup = """
    import numpy as np
    from sdp_plugins.core import Group
    group = Group.from_env()
    data = np.zeros(200_000, np.float32)
    reduce = lambda: group.all_reduce(data)
    reduce()
    group.timeout_s = 3
    """
    path = script(LINK_DOWN.format(setup=setup.strip(), patience_s=4))
    options = ("--nodes", "2", "--ranks-per-node", "1", "--launcher", "mpirun")
    done = run(*options, "--mpi-prefix", MPI, program=[path])
    lines = sorted(line for line in done.stdout.splitlines() if "Error" in line)
    # mpirun itself may end the node that it cannot reach any more.
    assert "0 CollectiveTimeoutError True" in lines, done.stdout + done.stderr


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
    lines = sorted(line for line in done.stdout.splitlines() if "Error" in line)
    # Who hears of it second may find the connection closed.
    assert len(lines) == 2 and all(
        line in (f"{rank} CollectiveTimeoutError True", f"{rank} PeerLostError True")
        for rank, line in enumerate(lines)
    ), done.stdout + done.stderr


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=needs_mpi)])
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
