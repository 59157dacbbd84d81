"""`sdp doctor`: what it prints, its exit codes, and what it measures."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from sdp_plugins import __version__
from sdp_plugins.doctor import speed
from sdp_plugins.doctor.finding import Finding, Status, error, ok, warning
from sdp_plugins.doctor.machine import Machine
from sdp_plugins.doctor.report import SCHEMA
from sdp_plugins.doctor.speed import Case, Speed
from sdp_plugins.doctor.verdict import verdict
from tests.doctor.machines import DOCTOR, doctor, healthy, with_variables
from tests.processes import wait_until_gone
from tests.ranks import HANG_S

ESCAPE = "\x1b["
BAD = {"SDP_TIMEOUT": "30", "SDP_STAGING_BYTES": "many", "A_PASSWORD": "hunter2"}
TWO = ("--check", "settings", "--check", "unknown-variables", "--check", "threads")

# ---- all of it on this machine -------------------------------------------------------------------


def test_this_machine() -> None:
    done = doctor("--json")
    report = json.loads(done.stdout)
    assert [f for f in report["findings"] if f["status"] == "error"] == []
    assert done.returncode == 0
    large, small = report["speed"]["cases"]
    assert (large["nbytes"], small["nbytes"]) == (25 * 2**20, 4096)
    assert (large["path"], small["path"]) == ("zero-copy", "inline")
    assert large["ratio"] > 0 and small["ratio"] > 0 and report["speed"]["reference"] == "gloo"
    times = r"[\d.]+ times gloo for 25 MiB \([\d.]+ [mµ]s, zero-copy\), [\d.]+ times gloo for 4 K"
    assert re.match(rf"smddp is in use here: {times}", report["verdict"])
    assert "sdp doctor: measuring on two ranks ...\n" in done.stderr


def test_nothing_is_measured_where_smddp_cannot_work() -> None:
    done = doctor("--json", SDP_STAGING_BYTES="many")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["speed"] is None
    first = "smddp is not in use here: SDP_STAGING_BYTES='many' cannot be used."
    assert report["verdict"] == first


def test_nothing_is_measured_if_the_user_says_so() -> None:
    report = json.loads(doctor("--json", "--no-speed").stdout)
    assert report["speed"] is None and report["verdict"].startswith("smddp can be used here; ")


# ---- what is printed -----------------------------------------------------------------------------


def test_problems_come_first_and_good_news_is_counted() -> None:
    done = doctor(*TWO, **BAD)
    assert done.returncode == 1 and ESCAPE not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == "Environment variables"
    assert lines[1].startswith("  error   settings: SDP_STAGING_BYTES='many' cannot be used")
    assert lines[2].strip().startswith("Hint: set it to a whole number of bytes")
    assert lines[3] == "  warning unknown-variables: sdp_plugins has no variable SDP_TIMEOUT"
    assert lines[-1] == "1 ok, 0 skipped, 1 warning, 1 error (--all shows them)"
    assert "threads" not in done.stdout
    shown = doctor(*TWO, "--all", **BAD).stdout.splitlines()
    assert shown[-2].startswith("  ok      threads: ") and shown[-1].endswith("1 error")


def test_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    child = subprocess.Popen(
        [*DOCTOR, *TWO],
        env={**os.environ, **BAD, "TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
    )
    os.close(theirs)
    output = b""
    try:
        while block := _read(ours):
            output += block
    finally:
        os.close(ours)
        assert child.wait(HANG_S) == 1
    text = output.decode()
    assert ESCAPE in text and "settings" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(len(line) for line in plain.splitlines()) <= 60


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # the other end is closed
        return b""


def test_json_has_what_a_bug_report_needs_and_no_secrets() -> None:
    done = doctor("--json", *TWO, **BAD)
    report = json.loads(done.stdout)
    assert report["schema"] == SCHEMA == 1
    assert {*report} == {
        *("schema", "host", "versions", "machine", "environment", "findings", "speed"),
        *("verdict", "addresses", "hosts"),
    }
    assert report["versions"]["sdp-plugins"] == __version__
    assert report["versions"]["python"].count(".") == 2 and "torch" in report["versions"]
    assert report["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert report["environment"]["SDP_STAGING_BYTES"] == "many"
    assert {*report["findings"][0]} == {"status", "text", "remedy", "slows", "subject", "check"}
    assert "hunter2" not in done.stdout and "A_PASSWORD" not in done.stdout
    assert report["speed"] is None and report["hosts"] == []


def test_the_reader_closes_the_pipe() -> None:
    line = " ".join([*DOCTOR, *TWO, "--all", "| true; echo ${PIPESTATUS[0]}"])
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert done.stderr == "" and int(done.stdout) in (0, 141)  # it may have been faster


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str) -> None:
    line = f"{shlex.join([*DOCTOR, *TWO, '--all'])} {closed}"
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    shown = "" if re.search("(^| )>&-", closed) else "Environment variables\n"
    assert done.stdout.startswith(shown) and bool(done.stdout) == bool(shown)


def test_a_disk_that_is_full() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*DOCTOR, *TWO],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANG_S,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "sdp doctor: [Errno 28] No space left on device\n"


def test_a_folder_that_has_been_deleted(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    line = f"cd {tmp_path}/old && rmdir ../old && exec {shlex.join([*DOCTOR, *TWO])}"
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    text = "sdp doctor: the current folder has been deleted. Hint: cd to another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", text)


# ---- exit codes, and how it is called ------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--check", "settings"), 0),
        (("--check", "nonsense"), 2),
        (("--ranks", "0"), 2),
        (("--timeout", "0"), 2),
        (("--hosts", "a b"), 2),
        (("--hosts", ""), 2),
        (("--hosts", ","), 2),
        (("--hosts", "a", "--hostfile", "b"), 2),
        (("--hostfile", "/no/such/file"), 2),
        (("/no/such/script.py",), 2),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int) -> None:
    done = doctor(*arguments)
    assert done.returncode == code, done.stderr
    assert code != 2 or done.stderr.startswith("usage: sdp doctor")


def test_a_warning_is_no_error() -> None:
    assert doctor("--check", "unknown-variables", SDP_TIMEOUT="30").returncode == 0


def test_the_subcommand_of_sdp() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sdp_plugins.launch", "doctor", "--check", "settings", "--all"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("Environment variables\n  ok ")


# ---- the measurement -----------------------------------------------------------------------------


def without_torch(**variables: str) -> Machine:
    machine = with_variables(Machine(), **variables)
    vars(machine)["packages"] = {}
    return machine


def test_without_torch_the_core_is_compared_with_a_memcpy() -> None:
    found = speed.measure(without_torch(), HANG_S)
    assert found.reference == "memcpy" and not found.failed
    assert [case.path for case in found.cases] == ["zero-copy", "inline"]
    assert all(case.us > 0 for case in found.cases)
    assert [case.ratio > 0 for case in found.compared] == [True]  # of 25 MiB


def test_ranks_that_fail() -> None:
    found = speed.measure(without_torch(SDP_SPIN_US="soon"), HANG_S)
    told = problem_of(found)
    assert told.status is Status.error and "SDP_SPIN_US='soon'" in told.text
    assert told.remedy.startswith("sdp run -n 2 -m sdp_plugins.doctor.speed_rank")


def test_ranks_that_take_too_long() -> None:
    """It says nothing about smddp: the machine may be busy."""
    done = doctor("--timeout", "0.2")
    assert done.returncode == 0, done.stdout
    told = "  warning speed: the speed was not measured: two ranks take longer than 0.1 s"
    assert f"{told}\n          Hint: sdp doctor --timeout 300\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("smddp can be used here; ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_measurement_leaves_no_process(number: signal.Signals) -> None:
    """A script that ends the command by a signal, which goes to no other process."""
    with subprocess.Popen(DOCTOR, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as doctor:
        ours, end = psutil.Process(doctor.pid), time.monotonic() + HANG_S
        while len(started := ours.children(recursive=True)) < 3:  # sdp run, and two ranks
            assert doctor.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        doctor.send_signal(number)
        assert doctor.wait(HANG_S) == 128 + signal.SIGINT
    wait_until_gone(started)


def problem_of(found: Speed) -> Finding:
    (told,) = (f for f in speed.findings(found) if f.is_problem)
    return told


LARGE = Case(25 * 2**20, "zero-copy", 1500.0, 18000.0, 12.0)
SMALL = Case(4096, "inline", 11.0, 320.0, 29.0)
ALONE = Case(4096, "inline", 11.0)


def test_what_the_measurement_says() -> None:
    good = Speed("gloo", (LARGE, SMALL))
    assert not [f for f in speed.findings(good) if f.is_problem]
    slow = problem_of(Speed("gloo", (replace(LARGE, ratio=1.5), SMALL)))
    assert slow.check == "speed" and "25 MiB is 1.5 times as fast as gloo" in slow.text
    late = problem_of(Speed("gloo", (LARGE, replace(SMALL, ratio=0.9))))
    assert "4 KiB is 0.9 times as fast as gloo" in late.text and "idle machine" in late.remedy
    alike = Speed("memcpy", (replace(LARGE, ratio=0.8), ALONE))
    assert not [f for f in speed.findings(alike) if f.is_problem]
    alone = problem_of(Speed("", (LARGE, SMALL), no_gloo="no address"))
    assert "no address" in alone.text and alone.remedy.startswith("unset GLOO_SOCKET_IFNAME")
    staged = replace(LARGE, path="staged")
    off = problem_of(Speed("gloo", (staged, SMALL)))
    assert off.check == "path" and off.remedy == "unset SDP_REGISTER" and off.slows
    full = problem_of(Speed("gloo", (staged, SMALL), not_shared="no memory. Hint: ..."))
    assert "no memory" in full.text and "free memory" in full.remedy


def test_the_verdict(tmp_path: Path) -> None:
    machine = healthy(tmp_path)
    assert machine.ranks == 2
    good = Speed("gloo", (LARGE, SMALL))
    first = "smddp is in use here: 12.0 times gloo for 25 MiB (1.5 ms, zero-copy), 29.0 times gloo"
    assert verdict([ok("well")], good).startswith(first)
    assert verdict([ok("well")], good).endswith("; nothing slows it down.")
    core = Speed("memcpy", (LARGE, ALONE))
    first = "smddp is in use here: 12.0 times memcpy for 25 MiB (1.5 ms, zero-copy); nothing "
    assert verdict([ok("well")], core).startswith(first)
    slow = Finding(Status.warning, "x", "y", slows=True, check="threads")
    assert verdict([slow, slow], good).endswith("; it is slowed down by threads.")
    broken = Finding(Status.error, "no entry point", "y", check="installation")
    follows = Finding(Status.error, "not registered", "y", check="torch-backend")
    assert verdict([follows, broken], None) == "smddp is not in use here: no entry point."
    missing = Finding(Status.error, "numpy is not installed", "y", check="package-versions")
    assert verdict([follows, missing], None) == "smddp is not in use here: numpy is not installed."
    other = Finding(Status.error, "x", "y", check="gloo-interface")
    assert "but there is 1 error; " in verdict([other, warning("a", "b")], good)
    assert verdict([error("a", "b"), ok("c")], None).startswith("smddp can be used here, but")
