"""Hosts that this machine plays, as SageMaker starts containers.

Each is a process in namespaces of its own (pid, mount, network, uts) that sees this machine's
files; what it writes into the system's folders stays its own, and its /opt/ml is a folder of the
job's. They are named algo-1, algo-2, ... and joined by their interfaces eth0. A command runs on all
of them; what it prints goes to the host's `log`.

The job has ended when the first host's command has; the others have a while then, as SageMaker
gives them. All of it runs in a sandbox whose end, however it comes, is the end of all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SANDBOX = ("unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "--mount", "--uts")
OWN_FOLDERS = ("etc", "root", "tmp", "opt", "var")
GRACE_S = 90.0  # the toolkit's workers sleep for 30 s before they look whether the job has ended
READY_S = 20.0


def address(host: int) -> str:
    """A host's address, the first host's being number 0."""
    return f"10.78.0.{host + 1}"


def name(host: int) -> str:
    """A host's name, as SageMaker's are."""
    return f"algo-{host + 1}"


def in_sandbox(folder: Path, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` on the hosts of which `folder` has a folder each."""
    return [
        *("setpriv", "--pdeathsig", "KILL"),
        *(*SANDBOX, "--net"),
        *(sys.executable, __file__, "all", str(folder), *command),
    ]


def run(*line: str) -> None:
    """Run a tool.

    Raises:
        OSError: It failed; with what it said.
    """
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(line)}: {done.stderr.strip()}")


def run_all(folder: Path, command: Sequence[str]) -> None:
    """Start the hosts and wait for the job's end."""
    hosts = [folder / name(host) for host in range(len([*folder.glob("algo-*")]))]
    run(*["ip", "link", "add", "switch", "type", "bridge"])
    run(*["ip", "link", "set", "switch", "up"])
    processes = []
    for host, place in enumerate(hosts):
        line = [*SANDBOX, "--net", sys.executable, __file__, "one", str(place), *command]
        with (place / "log").open("wb") as log:
            processes.append(subprocess.Popen(line, stdout=log, stderr=log))
        connect(host, processes[host].pid)
        (place / "connected").touch()
    processes[0].wait()
    deadline = time.monotonic() + (0.0 if processes[0].returncode else GRACE_S)
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.1)
    codes = [process.poll() for process in processes]  # None: it was still at work
    (folder / "codes").write_text(json.dumps(codes))


def connect(host: int, pid: int) -> None:
    """Join a host to the switch by its eth0, once it is in a network of its own."""
    ours = os.readlink("/proc/self/ns/net")
    deadline = time.monotonic() + READY_S
    while os.readlink(f"/proc/{pid}/ns/net") == ours and time.monotonic() < deadline:
        time.sleep(0.01)
    line = f"ip link add port{host} type veth peer name eth0 netns {pid}"
    run(*line.split())
    run(*f"ip link set port{host} master switch up".split())


def run_one(place: Path, command: Sequence[str]) -> int:
    """Be a host: prepare its folders and its network, and run the command."""
    number = int(place.name.split("-")[1]) - 1
    hosts = len([*place.parent.glob("algo-*")])
    deadline = time.monotonic() + READY_S
    while not (place / "connected").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    own_folders(place)
    run("hostname", place.name)
    run("ip", "address", "add", f"{address(number)}/24", "dev", "eth0")
    for interface in ("lo", "eth0"):
        run("ip", "link", "set", interface, "up")
    names = [f"{address(host)} {name(host)}\n" for host in range(hosts)]
    Path("/etc/hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
    return until_it_ends(subprocess.Popen(command, cwd="/").pid)


def until_it_ends(pid: int) -> int:
    """The exit code of a process, as the init process does it: whatever ends meanwhile is reaped.

    Else mpirun's daemon would stay a zombie, for whose end the toolkit waits.
    """
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def own_folders(place: Path) -> None:
    """Lay over the system's folders what is written there, and mount what must be its own."""
    run(*["mount", "-t", "tmpfs", "none", "/run"])
    os.chmod("/run", 0o755)
    for folder in OWN_FOLDERS:
        upper, work = Path("/run/own", folder, "upper"), Path("/run/own", folder, "work")
        upper.mkdir(parents=True)
        work.mkdir()
        os.chmod(upper, os.stat(f"/{folder}").st_mode & 0o7777)
    opened = os.open(place / "ml", os.O_PATH)  # it may lie in a folder that is laid over
    for folder in OWN_FOLDERS:
        own = f"/run/own/{folder}"
        options = f"lowerdir=/{folder},upperdir={own}/upper,workdir={own}/work"
        run("mount", "-t", "overlay", "none", "-o", options, f"/{folder}")
    Path("/opt/ml").mkdir(exist_ok=True)
    found = f"/proc/{os.getpid()}/fd/{opened}"
    run("mount", "--no-canonicalize", "--bind", found, "/opt/ml")
    os.close(opened)
    run(*["mount", "-t", "tmpfs", "none", "/dev/shm"])
    prepare_ssh(Path("~root/.ssh").expanduser(), place.parent / "key")


def prepare_ssh(folder: Path, key: Path) -> None:
    """What the Dockerfile of a container with MPI does: one key for all hosts, no questions."""
    Path("/run/sshd").mkdir()
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "id_rsa").write_text(key.read_text())
    (folder / "id_rsa").chmod(0o600)
    (folder / "authorized_keys").write_text(key.with_suffix(".pub").read_text())
    (folder / "authorized_keys").chmod(0o600)
    (folder / "config").write_text("Host *\n  StrictHostKeyChecking no\n  LogLevel ERROR\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    _, which, where, *rest = sys.argv
    if which == "all":
        run_all(Path(where), rest)
    else:
        sys.exit(run_one(Path(where), rest))
