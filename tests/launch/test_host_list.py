"""What `sdp run --hosts` makes of lists, names and mpirun's words, without any mpirun."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import sdp_plugins
from sdp_plugins.core import announced
from sdp_plugins.core.regroup import Handle
from sdp_plugins.core.regroup.roster import Member, Roster
from sdp_plugins.launch.hosts import LaunchError, addresses, agent_messages, preflight
from sdp_plugins.launch.hosts.agent_messages import TOKEN
from sdp_plugins.launch.hosts.diagnosis import explained
from sdp_plugins.launch.hosts.elastic_hosts import ElasticHosts
from sdp_plugins.launch.hosts.host_job import (
    HostJob,
    HostPlan,
    forwarded_names,
    mpirun_environment,
)
from sdp_plugins.launch.hosts.host_list import parse_hostfile, parse_hosts, placed
from sdp_plugins.launch.hosts.mpirun import (
    INTEL_MPI,
    MPICH,
    OPEN_MPI,
    Mpirun,
    check_library,
    family_of,
    find,
    mpirun_line,
)
from sdp_plugins.launch.hosts.remote_rank import AgentConnection, RemoteRank
from sdp_plugins.launch.worker_group import RankOutput
from tests.ranks import HANG_S

ROOT = Path(__file__).parents[2]


def test_a_list_of_hosts() -> None:
    assert parse_hosts("a:4, b:2") == {"a": 4, "b": 2}
    assert parse_hosts("a,b") == {"a": None, "b": None}
    assert list(parse_hosts("b:2,a:2")) == ["b", "a"]
    assert parse_hosts("a:2,b:2,a:1") == {"a": 3, "b": 2}
    assert parse_hosts("a,a,10.0.0.1:8") == {"a": 2, "10.0.0.1": 8}


@pytest.mark.parametrize("text", ["a:", "a:x", "a:-1", "a b", "::1", "a:2:3", "-x", "a:0", "a;b"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="Hint: "):
        parse_hosts(text)


def test_a_hostfile_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "\ufeff# ours\n\na slots=4   # the big one\n"
        "b:2\n  c\nd slots = 3 max_slots=5\na:1\ne\tslots=2\n"
    )
    assert parse_hostfile(path) == {"a": 5, "b": 2, "c": None, "d": 3, "e": 2}


@pytest.mark.parametrize("line", ["a slot=4", "a 4", "a:4 slots=4", "a slots=", "a slots=x"])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"b:1\n{line}\n")
    with pytest.raises(LaunchError, match=r"hosts, line 2: .*Hint: "):
        parse_hostfile(path)


def test_a_hostfile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot read the hostfile .*No such file"):
        parse_hostfile(tmp_path / "hosts")


def test_ranks_fill_one_host_after_the_other() -> None:
    hosts = parse_hosts("a:4,b:4")
    assert placed(hosts, None) == {"a": 4, "b": 4}
    assert placed(hosts, 5) == {"a": 4, "b": 1}
    assert placed(hosts, 3) == {"a": 3}
    assert placed(parse_hosts("a,b"), None) == {"a": 1, "b": 1}
    assert placed(parse_hosts("a,b:2"), None) == {"a": 1, "b": 2}
    assert placed(parse_hosts("a,b"), 5) == {"a": 3, "b": 2}


@pytest.mark.parametrize(
    ("text", "hint"),
    [("me@a:2", "set the user in"), ("a:٣", "NAME:SLOTS"), ("a:4 ifname=x", "no other option")],
)
def test_what_is_no_host(text: str, hint: str) -> None:
    with pytest.raises(LaunchError, match=hint):
        parse_hosts(text)


@pytest.mark.parametrize(("text", "ranks"), [("a:4,b:4", 9), ("a,b:2", 4), ("", None)])
def test_hosts_that_do_not_fit(text: str, ranks: int | None) -> None:
    with pytest.raises(LaunchError, match="Hint: "):
        placed(parse_hosts(text), ranks)


def test_messages_in_pieces() -> None:
    data = agent_messages.message(b"O", b"x" * 70000) + agent_messages.message(b"X", {"code": 3})
    inbox = agent_messages.Inbox(agent_messages.LONGEST)
    found = [one for i in range(0, len(data), 999) for one in inbox.feed(data[i : i + 999])]
    assert found == [(b"O", b"x" * 70000), (b"X", b'{"code": 3}')]
    with pytest.raises(ValueError, match="a message of"):
        list(agent_messages.Inbox(agent_messages.LONGEST_HELLO).feed(b"GET / HTTP/1.1\r\n"))


def test_strangers_can_neither_fill_nor_break_the_launcher() -> None:
    """They may say little, and nothing that JSON's reader cannot stand."""
    with pytest.raises(ValueError, match="a message of"):
        list(
            agent_messages.Inbox(agent_messages.LONGEST_HELLO).feed(
                agent_messages.message(b"H", b"[" * 200_000)
            )
        )
    with pytest.raises(ValueError, match="nested"):
        agent_messages.read_json(b"[" * 200_000)


def test_strangers_neither_get_nor_give_rosters() -> None:
    """A roster has the secrets by which one joins."""
    plan = HostPlan(
        HostJob((), "a:2", None, None, None, None, 0, (), "job"), {"a": 2}, None, [], {}, "t"
    )
    hosts = ElasticHosts(plan)
    roster = json.dumps(Roster(0, (Member(0, Handle("127.0.0.1", 1, "secret")),)).to_json())
    pairs = [socket.socketpair() for _ in range(3)]
    hosts.connections = [AgentConnection(ours, hosts.receive) for ours, _ in pairs]
    stranger, first, second = hosts.connections
    first.rank, second.rank = (RemoteRank(RankOutput(Mock(), Mock())) for _ in range(2))
    with pytest.raises((ValueError, KeyError)):
        hosts.receive(stranger, agent_messages.ROSTER, roster.encode())
    assert not hosts.new_rosters()
    hosts.receive(first, agent_messages.ROSTER, roster.encode())
    assert len(hosts.new_rosters()) == 1
    for (ours, theirs), told in zip(pairs, (b"", b"", b"secret"), strict=True):
        ours.shutdown(socket.SHUT_WR)
        assert told in theirs.recv(4096) if told else theirs.recv(4096) == b""
        ours.close(), theirs.close()


def test_addresses() -> None:
    assert addresses.is_here("127.0.0.1") and not addresses.is_here("192.0.2.1")
    assert addresses.resolve("localhost") == "127.0.0.1"
    assert addresses.launchers(["127.0.0.1", "127.0.0.1"]) == ["127.0.0.1"]
    assert addresses.master_address(["127.0.0.1"]) == "127.0.0.1"
    assert addresses.master_address(["192.0.2.1", "127.0.0.1"]) == "192.0.2.1"
    with pytest.raises(LaunchError, match=r"no host 'no-such-host\.invalid'.*Hint: "):
        addresses.resolve("no-such-host.invalid")


def test_the_first_host_is_named_as_others_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's own name is often that of its loopback."""
    monkeypatch.setattr(addresses, "ours_towards", lambda other: f"seen from {other}")
    assert addresses.master_address(["127.0.0.1", "192.0.2.7"]) == "seen from 192.0.2.7"


def test_command_lines() -> None:
    places, names, command = {"a": 2, "b": 1}, ["PATH", "SDP_X"], ["python", "x.py"]
    open_mpi = mpirun_line(Mpirun(Path("/m"), OPEN_MPI, "5"), places, names, command)
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    assert open_mpi == [
        *("/m", *root, "--map-by", "slot", "--bind-to", "none", "-x", "PATH", "-x", "SDP_X"),
        *("--host", "a:2,b:1", "-n", "3", *command),
    ]
    older = mpirun_line(Mpirun(Path("/m"), OPEN_MPI, "4.1"), places, names, command)
    named = ["-x", "PATH", "-x", "SDP_X", *command]  # Open MPI 4.1's -x is of one part
    parts = ["-n", "2", "-host", "a:2", *named, ":", "-n", "1", "-host", "b:1", *named]
    assert older == ["/m", *root, "--map-by", "slot", "--bind-to", "none", *parts]
    mpich = mpirun_line(Mpirun(Path("/m"), MPICH, "5"), places, names, command)
    assert mpich == ["/m", "-genvlist", "PATH,SDP_X", "-hosts", "a:2,b:1", "-n", "3", *command]
    intel = mpirun_line(Mpirun(Path("/m"), INTEL_MPI, "2021"), places, names, command)
    assert intel[3:] == ["-n", "2", "-host", "a", *command, ":", "-n", "1", "-host", "b", *command]


def test_what_is_passed_on() -> None:
    base = {
        "AWS_SECRET_ACCESS_KEY": "x",
        "HF_TOKEN": "x",
        "PATH": "/bin",
        "PYTHONPATH": "/p",
        "SDP_TIMEOUT_S": "5",
        "RANK": "7",
        "MASTER_ADDR": "elsewhere",
        "OMPI_COMM_WORLD_RANK": "3",
        "UCX_TLS": "tcp",
    }
    ours = mpirun_environment(base, token="t", threads=None, exported=["HF_TOKEN", "A=b"])
    names = forwarded_names(ours, ["HF_TOKEN", "A=b"])
    assert names == sorted(
        ["A", "GLIBC_TUNABLES", "HF_TOKEN", "PATH", "PYTHONPATH", TOKEN, "SDP_TIMEOUT_S", "UCX_TLS"]
    )
    assert list(ours)[-1] not in names  # MPICH's mpirun would lose it
    assert not {"RANK", "MASTER_ADDR", "OMPI_COMM_WORLD_RANK", "OMP_NUM_THREADS"} & set(ours)
    assert ours["AWS_SECRET_ACCESS_KEY"] == "x" and ours["A"] == "b"  # mpirun's own, here
    threads = mpirun_environment(base, token="t", threads=3, exported=[])
    assert threads["OMP_NUM_THREADS"] == "3" and "OMP_NUM_THREADS" in forwarded_names(threads, [])
    with pytest.raises(LaunchError, match="-x NOPE: the variable is not set here"):
        mpirun_environment(base, token="t", threads=None, exported=["NOPE"])


@pytest.mark.parametrize(
    ("text", "family", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs", OPEN_MPI, "5.0.11"),
        ("mpirun (Open MPI) 4.1.4\n", OPEN_MPI, "4.1.4"),
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", OPEN_MPI, "4.1.4"),
        ("HYDRA build details:\n    Version:    5.0.2\n    Release", MPICH, "5.0.2"),
        ("MPICH Version:      4.3.0b1\nMPICH Release date", MPICH, "4.3.0b1"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 2", INTEL_MPI, "2021.18"),
    ],
)
def test_families(text: str, family: str, version: str) -> None:
    assert family_of(text) == (family, version)


# ---- which mpirun --------------------------------------------------------------------------------


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_two_mpis_have_to_be_chosen_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = program(tmp_path / "beside", "mpirun", "echo 'HYDRA build details: Version: 5.0.2'")
    in_path = program(tmp_path / "bin", "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    monkeypatch.setattr(sys, "executable", str(beside.with_name("python")))
    path = {"PATH": f"{in_path.parent}:/usr/bin:/bin"}
    with pytest.raises(LaunchError) as error:
        find(None, path)
    for part in (f"{in_path} (Open MPI 4.1.4)", f"{beside} (MPICH 5.0.2)", "Hint: ", "--mpirun "):
        assert part in str(error.value)
    assert find(str(beside), path).family == MPICH
    beside.unlink()
    assert find(None, path).path == in_path
    in_path.unlink()
    with pytest.raises(LaunchError, match=r"needs an mpirun.*pip install mpi4py mpich"):
        find(None, {"PATH": str(in_path.parent)})


def test_an_mpirun_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="there is no program '/nowhere/mpirun'"):
        find("/nowhere/mpirun", {})
    wrong = program(tmp_path, "mpirun", "echo what?")
    with pytest.raises(LaunchError, match="names neither Open MPI nor"):
        find(str(wrong), dict(os.environ))


def test_the_ranks_mpi_has_to_be_mpiruns() -> None:
    mpirun = Mpirun(Path("/m"), MPICH, "5.0")
    check_library(mpirun, None)
    check_library(mpirun, (INTEL_MPI, "2021"))
    with pytest.raises(LaunchError, match=r"two MPIs: /m \(MPICH 5.0\).*Open MPI 4.1.*Hint: "):
        check_library(mpirun, (OPEN_MPI, "4.1"))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("ssh: Could not resolve hostname b: Name or service not known", "spelling"),
        ("Host key verification failed.\r\n", "known_hosts"),
        ("root@b: Permission denied (publickey,password).", "ssh-copy-id b"),
        ("ssh: connect to host b port 22: Connection refused", "sshd"),
        ("ssh: connect to host b port 22: Connection timed out", "that it is up"),
        ("ModuleNotFoundError: No module named 'sdp_plugins'", "install it there"),
        (f"bash: line 1: {sys.executable}: No such file or directory", "same Python"),
        (f"env: '{sys.executable}': No such file or directory", "same Python"),
        ("something else", ""),
    ],
)
def test_known_complaints(text: str, part: str) -> None:
    line = explained(text, "b")
    assert bool(line) == bool(part) and part in line and "\n" not in line
    assert not line or ("Hint: " in line and "b" in line)


# ---- the command line ----------------------------------------------------------------------------


def sdp_run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sdp_plugins.launch", "run", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--hosts", "a:0"], "a has no slot"),
        (["--hosts", ""], "the list of hosts is empty"),
        (["--hosts", "localhost:2", "-n", "3"], "the hosts have 2 slots"),
        (["--hosts", "a", "--hostfile", "b"], "two lists"),
        (["--hosts", "no-such-host.invalid:2"], "there is no host 'no-such-host.invalid'"),
        (["--hosts", "localhost", "--mpirun", "/nowhere"], "there is no program '/nowhere'"),
    ],
)
def test_what_cannot_be_started_is_said_in_one_line(args: list[str], part: str) -> None:
    done = sdp_run(*args, "-m", "platform")
    assert done.returncode == 1, done.stderr
    assert part in done.stderr and "Hint: " in done.stderr
    assert done.stderr.startswith("sdp run: ") and done.stderr.count("\n") == 1


def test_a_host_that_answers_late_is_waited_for_in_words(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announced, "PATIENCE_S", 0.01)
    answer = f"import time; time.sleep(1); print('{sdp_plugins.__version__}')"
    preflight.check_together([sys.executable, "-c", answer], ["a", "b"], {})
    assert capfd.readouterr().err == "sdp run: waiting for a, b to answer ...\n"
