"""MPI on nodes that this machine plays; skipped where there can be none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.benchmarks.cluster import (
    LIMIT_S,
    LINK_DOWN,
    Script,
    cluster,
    environment,
    mpirun,
    run,
)
from tests.nodes import MPI, OPEN_MPI, needs_mpi, needs_nodes, needs_open_mpi

pytestmark = needs_nodes


@pytest.mark.parametrize(
    "mpi",
    [
        pytest.param(MPI, marks=[needs_mpi, pytest.mark.long], id="mpich"),
        pytest.param(OPEN_MPI, marks=[needs_open_mpi, pytest.mark.long], id="openmpi"),
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
        dist.init_process_group("smddp", rank=rank, world_size=size, timeout=timedelta(seconds=99))
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
            say("not belong to one MPI job" in str(error))
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
    # Rank 0 ends mpirun as soon as it has spoken; rank 1 lets it speak, however slow it is.
    path = script(LINK_DOWN.format(setup=setup.strip(), patience_s="100 * group.rank"))
    options = ("--nodes", "2", "--ranks-per-node", "1", "--launcher", "mpirun")
    done = run(*options, "--mpi-prefix", MPI, program=[path])
    said = Path(path).with_name("said by 0")
    assert said.read_text() == "CollectiveTimeoutError True", done.stdout + done.stderr
