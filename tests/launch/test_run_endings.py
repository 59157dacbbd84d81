"""How a job of `sdp run` ends: by failures and signals."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from sdp_plugins.launch.supervise import TERMINATE_GRACE_S
from tests.launch.jobs import HANGING, Script, launch, launch_all, read_pids, start
from tests.processes import runs, wait_until_gone
from tests.ranks import HANG_S


def test_exit_code_of_the_first_failure(script: Script) -> None:
    path = script("if rank == 1: sys.exit(int(sys.argv[1]))\ntime.sleep(600)")
    codes = [1, 7, 255]
    done = launch_all(*(("-n", "3", path, str(code)) for code in codes))
    assert [job.returncode for job in done] == codes


def test_a_rank_that_others_waited_for_in_vain(script: Script) -> None:
    text = "if os.environ['RANK'] == '1': sys.exit()\ntime.sleep(1.5)\nraise OSError('no peer')"
    done = launch("-n", "2", script(text))
    assert "failed first: exit code 1, after rank 1 had ended without an error." in done.stderr


def test_exit_code_of_a_signal(script: Script) -> None:
    path = script("if rank == 2: os.kill(os.getpid(), int(sys.argv[1]))\ntime.sleep(600)")
    numbers = [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]
    done = launch_all(*(("-n", "3", path, str(int(number))) for number in numbers))
    for number, job in zip(numbers, done, strict=True):
        assert job.returncode == 128 + number
        assert "rank 2 (pid " in job.stderr and f"killed by {number.name}" in job.stderr


def test_first_traceback_comes_last(script: Script) -> None:
    path = script(
        """
        def stop(*_): raise RuntimeError("a later failure")
        signal.signal(signal.SIGTERM, stop)
        print("noise", file=sys.stderr)
        touch(f"ready {rank}")
        if rank == 2:
            for other in (0, 1): await_file(f"ready {other}")
            try: {}["key"]
            except KeyError as error: raise ValueError("the reason") from error
        time.sleep(600)
        """
    )
    done = launch("-n", "3", path)
    assert done.returncode == 1
    head, _, last = done.stderr.rpartition("sdp run: rank 2 ")
    assert "failed first: exit code 1" in last
    assert last.rstrip().endswith("ValueError: the reason")
    assert "KeyError: 'key'" in last and "noise" not in last and "a later failure" not in last
    assert "a later failure" in head


# Rank 0 loses rank 1, but has ended before it: `late()` is after that.
LATE = """
def state(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
def late():
    await_file("pid")
    while state(pathlib.Path(__file__).with_name("pid").read_text()) != "Z": time.sleep(0.01)
    time.sleep(0.1)
def early(text):
    pid = pathlib.Path(__file__).with_name("new pid")
    pid.write_text(str(os.getpid()))
    pid.rename(pid.with_name("pid"))
    lose(text)
"""


def test_the_cause_may_come_after_who_it_befalls(script: Script) -> None:
    causes = {
        "raise ValueError('boom')": 1,
        "time.sleep(2.5)\nraise ValueError('boom')": 1,
        "os.kill(os.getpid(), 9)": 137,
        "sys.exit(7)": 7,
    }
    text = (
        LATE
        + "if rank == 2: time.sleep(600)\n"
        + "if rank == 0: early('rank 1 gave up: ValueError: boom')\n"
        + "late()\n"
    )
    jobs = launch_all(*(("-n", "3", script(text + cause, cause)) for cause in causes))
    for done, code in zip(jobs, causes.values(), strict=True):
        assert done.returncode == code, done.stderr
        _, _, last = done.stderr.rpartition("sdp run: rank 1 ")
        assert "failed first" in last and "PeerLostError" not in last


def test_the_rank_that_others_name_is_blamed(script: Script) -> None:
    path = script(
        LATE
        + "if rank == 0: early('rank 1 gave up: ValueError: boom')\n"
        + "late()\nprint('PeerLostError: seen and ignored', file=sys.stderr)\nsys.exit(7)"
    )
    done = launch("-n", "2", path)
    assert done.returncode == 7, done.stderr
    assert "sdp run: rank 1 " in done.stderr


def test_who_catches_and_prints_a_loss_is_not_the_cause(script: Script) -> None:
    path = script(
        LATE
        + "if rank == 0:\n"
        + "    try: early('rank 1 gave up: ValueError: boom')\n"
        + "    except Exception:\n"
        + "        print('Traceback (most recent call last):', file=sys.stderr)\n"
        + "        sys.exit(3)\n"
        + "late()\nprint('the end'); sys.exit(7)"
    )
    done = launch("-n", "2", path)
    assert done.returncode == 7, done.stderr
    assert "sdp run: rank 1 " in done.stderr


def test_who_exits_without_a_word_may_have_lost_another(script: Script) -> None:
    path = script(
        """
        if rank == 1:
            await_file("failing")
            sys.exit(3)  # it has caught the loss of rank 0, which is slow to end
        import atexit
        atexit.register(time.sleep, 0.4)
        touch("failing")
        raise ValueError("the reason")
        """
    )
    done = launch("-n", "2", path)
    assert done.returncode == 1, done.stderr
    _, _, last = done.stderr.rpartition("sdp run: rank 0 ")
    assert "failed first" in last and last.rstrip().endswith("ValueError: the reason")


def test_a_loss_that_was_only_logged_is_no_reason(script: Script) -> None:
    path = script(
        """
        if rank == 0:
            print("WARNING PeerLostError: went on without it", file=sys.stderr)
            touch("failing")
            raise ValueError("the reason")
        await_file("failing")
        time.sleep(0.5)
        raise KeyError("later")
        """
    )
    done = launch("-n", "2", path)
    assert "sdp run: rank 0 " in done.stderr, done.stderr


def test_who_lost_a_rank_is_blamed_if_no_other_failed(script: Script) -> None:
    text = "if rank == 0: lose('rank 1 has closed the group')\n"
    endings = ["sys.exit(0)", "time.sleep(600)"]
    jobs = launch_all(*(("-n", "2", script(text + ending, ending)) for ending in endings))
    for done in jobs:
        assert done.returncode == 1
        assert "sdp run: rank 0 " in done.stderr
        assert done.stderr.rstrip().endswith("rank 1 has closed the group")


def test_a_signal_ends_the_wait_for_the_cause(script: Script) -> None:
    path = script("print(os.getpid())\nif rank == 0: lose('rank 1 gave up')\ntime.sleep(600)")
    launcher = start("-n", "2", path)
    pids = read_pids(launcher, 2)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=HANG_S)
    assert launcher.returncode
    wait_until_gone(pids)


def test_a_rank_that_ignores_sigterm_is_killed(script: Script) -> None:
    path = script(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        touch(f"ready {rank}")
        if rank == 0:
            await_file("ready 1")
            sys.exit(3)
        time.sleep(600)
        """
    )
    done = launch("-n", "2", path)
    assert done.returncode == 3
    wait_until_gone([int(line.split()[-1]) for line in done.stdout.splitlines()])


def test_sigusr1_shows_where_ranks_are(script: Script) -> None:
    launcher = start("-n", "2", script(HANGING))
    assert launcher.stdout and launcher.stderr
    assert launcher.stdout.readline() == "[rank 0] waits\n"
    launcher.send_signal(signal.SIGUSR1)
    seen = ""
    while "in asleep\n" not in seen:
        line = launcher.stderr.readline()
        assert line, seen
        seen += line
    assert "for rank 1" in seen
    assert launcher.poll() is None  # the job goes on
    launcher.terminate()
    launcher.communicate(timeout=HANG_S)


def test_ctrl_c_is_passed_on_once(script: Script) -> None:
    path = script(
        """
        count = 0
        def interrupted(*_):
            global count
            count += 1
            print("interrupted", count, flush=True)
        signal.signal(signal.SIGINT, interrupted)
        print(os.getpid(), flush=True)
        end = time.monotonic() + 200
        while not count and time.monotonic() < end: time.sleep(0.01)
        time.sleep(0.5)
        sys.exit(0)
        """
    )
    launcher = start("-n", "2", path)
    read_pids(launcher, 2)
    launcher.send_signal(signal.SIGINT)
    stdout, stderr = launcher.communicate(timeout=HANG_S)
    assert sorted(stdout.splitlines()) == [f"[rank {r}] interrupted 1" for r in range(2)]
    assert launcher.returncode == 0, stderr  # the script coped with it


def test_ctrl_c_ends_a_plain_script(script: Script) -> None:
    # Not one long sleep: Python misses a signal that comes just before the call sleeps.
    path = script("print(os.getpid())\nwhile True: time.sleep(0.1)")
    launcher = start("-n", "2", path)
    pids = read_pids(launcher, 2)
    launcher.send_signal(signal.SIGINT)
    _, stderr = launcher.communicate(timeout=HANG_S)
    assert launcher.returncode == 128 + signal.SIGINT
    assert "failed first" not in stderr
    wait_until_gone(pids)


def test_second_ctrl_c_kills(script: Script) -> None:
    path = script(
        "signal.signal(signal.SIGINT, lambda *_: print('got it', flush=True))\n"
        "print(os.getpid())\nend = time.time() + 600\nwhile time.time() < end: time.sleep(1)"
    )
    launcher = start("-n", "2", path)
    pids = read_pids(launcher, 2)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout
    assert [launcher.stdout.readline().split("] ")[1] for _ in range(2)] == ["got it\n"] * 2
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=HANG_S)
    assert launcher.returncode == 128 + signal.SIGINT
    wait_until_gone(pids)


def test_ctrl_c_while_ranks_are_started(script: Script) -> None:
    path = script("time.sleep(60)")
    launcher = start("-n", "40", path)
    ranks = psutil.Process(launcher.pid)
    while not ranks.children():
        time.sleep(0.001)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=HANG_S)
    # Had it not reached them, they would end by SIGTERM, later.
    assert launcher.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_ends_the_job(script: Script, number: signal.Signals) -> None:
    launcher = start("-n", "2", script("print(os.getpid()); time.sleep(600)"))
    pids = read_pids(launcher, 2)
    launcher.send_signal(number)
    _, stderr = launcher.communicate(timeout=HANG_S)
    assert f"sdp run: received {number.name}; ending ranks 0, 1" in stderr
    assert launcher.returncode == 128 + signal.SIGTERM
    wait_until_gone(pids)


def test_ranks_have_time_to_save_at_sigterm(script: Script) -> None:
    path = script(
        f"""
        def save(*_):
            time.sleep({TERMINATE_GRACE_S} + 1)
            print("saved")
            sys.exit()
        signal.signal(signal.SIGTERM, save)
        print(os.getpid(), flush=True)
        time.sleep(600)
        """
    )
    launcher = start("-n", "1", path)
    read_pids(launcher, 1)
    launcher.terminate()
    stdout, _ = launcher.communicate(timeout=HANG_S)
    assert stdout == "[rank 0] saved\n"
    assert launcher.returncode == 0


FAMILY = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
other = subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp)
print(os.getpid(), flush=True)
print(child.pid, flush=True)
print(other.pid, flush=True)
"""


def test_nothing_survives_a_kill_of_the_launcher(script: Script) -> None:
    launcher = start("-n", "2", script(FAMILY + "time.sleep(600)"))
    pids = read_pids(launcher, 6)
    assert all(runs(pid) for pid in pids)
    launcher.kill()
    wait_until_gone(pids)
    launcher.communicate(timeout=HANG_S)  # the end of its pipes: nobody holds them any more


@pytest.mark.parametrize("ending", ["sys.exit(0)", "sys.exit(4 * rank)", "os.kill(os.getpid(), 9)"])
def test_nothing_survives_the_job(script: Script, ending: str, tmp_path: Path) -> None:
    launcher = start("-n", "2", script(FAMILY + f"await_file('go')\n{ending}"))
    pids = read_pids(launcher, 6)
    (tmp_path / "go").touch()
    launcher.communicate(timeout=HANG_S)
    wait_until_gone(pids)


def test_it_kills_only_what_it_started(script: Script) -> None:
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        launch("-n", "2", script("sys.exit(1)"))
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
