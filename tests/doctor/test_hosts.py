"""`sdp doctor --hosts`, with a program in the place of ssh that starts the doctor here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdp_plugins.doctor import across_hosts
from sdp_plugins.doctor.finding import Finding, Status
from sdp_plugins.doctor.hosts import Answer, skew
from sdp_plugins.doctor.report import Report, facts
from tests.doctor.machines import doctor, healthy, write

FAR, FARTHER = "198.51.100.1", "203.0.113.1"  # of no network
QUICK = ("--json", "--check", "loopback", "--check", "working-folder")
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Examines hosts; `shell` is what ssh does: $1 is the host, $2 its command."""

    def examined(*arguments: str, shell: str = 'eval "$2"', **more: Any) -> dict[str, Any]:
        agent = tmp_path / "ssh-agent"
        agent.write_text(f"#!/bin/sh\n{shell}\n")
        agent.chmod(0o755)
        done = doctor(*QUICK, *arguments, PRTE_MCA_plm_ssh_agent=str(agent), **more)
        report: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == any(f["status"] == "error" for f in all_findings(report))
        return report

    return examined


def all_findings(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [f for one in (report, *report["hosts"]) for f in one["findings"]]


def problems(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [f for f in all_findings(report) if f["status"] in ("error", "warning")]


def test_two_hosts(ask: Ask) -> None:
    report = ask("--hosts", f"localhost:2,{FAR}:2,{FARTHER}")
    assert problems(report) == []
    assert [one["host"] for one in report["hosts"]] == [FAR, FARTHER]
    checked = {f["check"] for f in report["findings"]}
    assert checked == {*across_hosts.NAMES, "loopback", "working-folder"}
    assert {f["check"] for f in report["hosts"][0]["findings"]} == {"loopback", "working-folder"}


def test_a_hostfile_and_variables(ask: Ask, tmp_path: Path) -> None:
    write(tmp_path, {"hosts": f"{FAR} slots=2\n"})
    report = ask("--hostfile", str(tmp_path / "hosts"), SDP_REGISTER="0", A_PASSWORD="hunter2")
    assert report["hosts"][0]["environment"]["SDP_REGISTER"] == "0"


def test_only_what_a_job_needs_is_sent(ask: Ask, tmp_path: Path) -> None:
    shell = f'tee {tmp_path}/sent | sh -c "$2"'
    ask("--hosts", FAR, shell=shell, A_PASSWORD="hunter2", SDP_SPIN_US="7")
    sent = (tmp_path / "sent").read_text()
    assert "SDP_SPIN_US" in sent and "hunter2" not in sent


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("Permission denied (publickey).", f"run `ssh-copy-id {FAR}`"),
        ("ssh: connect to host port 22: Connection refused", "start sshd there"),
        (f"sh: 1: {sys.executable}: not found", "every host needs the same Python at the same"),
        ("ModuleNotFoundError: No module named 'sdp_plugins'", "install it there"),
        ("something else", "work without a password"),
    ],
)
def test_a_host_that_cannot_be_used(ask: Ask, words: str, remedy: str) -> None:
    report = ask("--hosts", FAR, shell=f'echo "{words}" >&2; exit 255')
    (found,) = problems(report)
    assert found["check"] == "hosts-reachable" and found["status"] == "error"
    assert remedy in found["remedy"] and FAR in found["text"] + found["remedy"]
    assert report["hosts"] == []


def test_a_host_without_address(ask: Ask) -> None:
    report = ask("--hosts", "no-such-host.invalid,localhost")
    (found,) = problems(report)
    assert found["check"] == "hosts-reachable"
    assert "getent hosts no-such-host.invalid" in found["remedy"]


def test_a_host_that_hangs_does_not_keep_the_others(ask: Ask, tmp_path: Path) -> None:
    shell = f'if [ "$1" = {FAR} ]; then sleep 600; fi; eval "$2"'
    report = ask("--hosts", f"{FAR},{FARTHER}", "--timeout", "12", shell=shell)
    (found,) = problems(report)
    assert found["text"].startswith(f"{FAR} does not answer ")
    assert found["text"].endswith(" in 12 s") and "by hand" in found["remedy"]
    assert [one["host"] for one in report["hosts"]] == [FARTHER]


def test_a_host_that_answers_nonsense(ask: Ask) -> None:
    old = json.dumps({"report": {"schema": 0}, "clock": 0, "took_s": 0})
    report = ask("--hosts", FAR, shell=f"cat > /dev/null; echo 'sdp-doctor {old}'")
    (found,) = problems(report)
    assert "schema 0" in found["text"] and "same version of sdp-plugins" in found["remedy"]


def test_no_ssh(ask: Ask, tmp_path: Path) -> None:
    done = doctor(*QUICK, "--hosts", FAR, PRTE_MCA_plm_ssh_agent=str(tmp_path / "missing"))
    (found,) = problems(json.loads(done.stdout))
    assert "cannot be started" in found["text"] and "openssh-client" in found["remedy"]


def test_a_folder_that_a_host_does_not_have(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    report = ask("--hosts", FAR, shell='rmdir "$PWD"; cd /; eval "$2"', cwd=tmp_path / "here")
    (found,) = (f for f in report["hosts"][0]["findings"] if f["status"] == "error")
    assert found["check"] == "working-folder" and found["remedy"].startswith("mkdir -p ")


def test_a_clock_that_is_wrong(ask: Ask, tmp_path: Path) -> None:
    """The other host's Python is an hour ahead."""
    patch = "import time\nnow = time.time\ntime.time = lambda: now() + 3600\n"
    write(tmp_path / "ahead", {"sitecustomize.py": patch})
    shell = f'PYTHONPATH={tmp_path}/ahead; export PYTHONPATH; eval "$2"'
    (found,) = problems(ask("--hosts", FAR, shell=shell))
    assert found["check"] == "hosts-clocks" and found["status"] == "warning"
    assert "at least 3" in found["text"] and "chronyd" in found["remedy"]


def test_containers_of_one_machine(ask: Ask) -> None:
    """Each has a network of its own, so ranks find no common memory."""
    done = doctor("--json", "--check", "settings", setup=None)
    assert done.returncode == 0
    own = Report.from_json(json.loads(done.stdout))
    other = replace(own, host=FAR, machine={**own.machine, "network": 1})
    found = compared(own, [Answer("here", own), Answer(FAR, other)])
    assert found.check == "hosts-memory" and "docker run --network=host" in found.remedy


# ---- what is compared ----------------------------------------------------------------------------


def report_of(folder: Path, host: str = "a", **versions: str) -> Report:
    given = facts(healthy(folder))
    given["host"], given["versions"] = host, {**given["versions"], **versions}
    return Report(findings=[], **given)


def compared(own: Report, answers: list[Answer]) -> Finding:
    (found,) = (f for f in across_hosts.compare(own, answers) if f.is_problem)
    return found


@pytest.mark.parametrize(
    ("versions", "status", "remedy"),
    [
        ({"torch": "2.14.0"}, Status.error, "on b: pip install torch==2.13.0"),
        (
            {"sdp-plugins": "0.1"},
            Status.error,
            "on b: pip install --force-reinstall --no-deps -e CLONE",
        ),
        ({"numpy": "1.26.4"}, Status.warning, "on b: pip install numpy==2.0.0"),
        ({"python": "3.9.1"}, Status.warning, "make the same virtual environment on all hosts"),
        ({"jax": "0.6.0"}, Status.error, "on this host: pip install jax==0.6.0"),
    ],
)
def test_versions(tmp_path: Path, versions: dict[str, str], status: Status, remedy: str) -> None:
    own, other = report_of(tmp_path), report_of(tmp_path, "b", **versions)
    found = compared(own, [Answer("a", own), Answer("b", other)])
    assert (found.check, found.status) == ("hosts-versions", status)
    assert found.remedy.startswith(remedy)


def test_a_name_that_means_another_hosts_loopback(tmp_path: Path) -> None:
    own = report_of(tmp_path)
    other = replace(report_of(tmp_path, "b"), addresses={"a": "127.0.1.1", "b": "127.0.1.1"})
    found = compared(own, [Answer("a", own), Answer("b", other)])
    assert found.check == "hosts-addresses" and found.text.startswith("on b, a means 127.0.1.1")
    assert found.remedy == "give a its address in /etc/hosts of b"


@pytest.mark.parametrize(
    ("clock", "least"),
    [(100.5, 0.0), (101.9, 0.0), (112.0, 10.0), (95.0, 5.0)],
    ids=["as called", "as answered", "ahead", "behind"],
)
def test_the_skew_is_what_the_way_cannot_explain(clock: float, least: float) -> None:
    assert skew(100.0, 105.0, clock, 3.0) == pytest.approx(least)
