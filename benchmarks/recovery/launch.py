"""Starts a training by each of the ways to go on, and ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from benchmarks.job import PACKAGE_ROOT, JobError
from benchmarks.recovery.said import Said, read
from sdp_plugins.core.addresses_and_ports import free_port

SMDDP, TORCHELASTIC, TORCHFT = "smddp", "torchelastic", "torchft"
VARIANTS = (SMDDP, TORCHELASTIC, TORCHFT)
LIGHTHOUSE = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")
# Without it, ranks that torchrun 2.13 starts again find the addresses of the former ones in the
# store, and cannot connect over gloo: https://github.com/pytorch/pytorch/issues/135712
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RESTARTS = 10  # allowed for each kill
LIMIT_S = 180.0
END_LIMIT_S = 10.0
LOOK_S = 0.1

T = TypeVar("T")
Line = tuple[list[str], Mapping[str, str]]
"""A command line, and variables of its environment."""


@dataclass(frozen=True)
class Launch:
    """How to start a training.

    Attributes:
        variant: One of VARIANTS.
        ranks: Number of ranks.
        kills: How many are killed.
        checkpoint_steps: torchelastic saves a checkpoint after so many steps.
        torchft: The virtual environment in which torchft is installed.
    """

    variant: str
    ranks: int
    kills: int
    checkpoint_steps: int = 1
    torchft: Path | None = None

    def lines(self, setting: str) -> list[Line]:
        """Return the commands to start, the job's own ones last."""
        task = [str(PACKAGE_ROOT / "benchmarks" / "recovery" / f"train_{self.variant}.py"), setting]
        restarts = str(RESTARTS * self.kills)
        if self.variant == SMDDP:
            sizes = ["--elastic", f"1:{self.ranks}", "--max-restarts", restarts]
            return [([sys.executable, "-m", "sdp_plugins.launch", "run", *sizes, *task], {})]
        sizes = ["--max-restarts", restarts]
        if self.variant == TORCHELASTIC:
            sizes += ["--standalone", f"--nproc-per-node={self.ranks}"]
            return [([*_torchrun(sys.executable), *sizes, *task], NEW_STORE)]
        assert self.torchft is not None
        programs = self.torchft / "bin"
        address, *ports = (free_port() for _ in range(1 + self.ranks))
        lighthouse = [f"{programs}/torchft_lighthouse", "--bind", f"[::]:{address}", *LIGHTHOUSE]
        lines: list[Line] = [(lighthouse, {})]
        for number, port in enumerate(ports):
            variables = {
                "TORCHFT_LIGHTHOUSE": f"http://localhost:{address}",
                "REPLICA_GROUP_ID": str(number),
                "NUM_REPLICA_GROUPS": str(self.ranks),
            }
            here = [f"--master-port={port}", "--nnodes=1", "--nproc-per-node=1"]
            line = [*_torchrun(f"{programs}/python"), *sizes, *here, *task]
            lines.append((line, variables))
        return lines


def missing(variant: str, torchft: Path | None) -> str:
    """Return why a variant cannot be measured, or an empty string."""
    if variant != TORCHFT or (torchft and (torchft / "bin" / "torchft_lighthouse").exists()):
        return ""
    return "needs a virtual environment with torchft-nightly: --torchft FOLDER"


def _torchrun(python: str) -> list[str]:
    return [python, "-m", "torch.distributed.run"]


@dataclass
class Training:
    """A training that runs, and a context manager: on exit it ends all its processes.

    Attributes:
        launch: How it has been started.
        said: What its ranks have said.
    """

    launch: Launch
    said: list[Said] = field(default_factory=list)

    def __enter__(self) -> Training:
        self._folder = tempfile.TemporaryDirectory(prefix="sdp-bench-")
        self._output = tempfile.TemporaryFile()
        path = f"{self._folder.name}/said"
        self._fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._read_nbytes = 0
        setting = {
            "said": path,
            "runner_pid": os.getpid(),
            "checkpoint": f"{self._folder.name}/checkpoint",
            "checkpoint_steps": self.launch.checkpoint_steps,
        }
        self._processes = [self._started(line) for line in self.launch.lines(json.dumps(setting))]
        return self

    def _started(self, line: Line) -> subprocess.Popen[bytes]:
        command, variables = line
        path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]))
        return subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        end = time.monotonic() + END_LIMIT_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
            process.wait()
        os.close(self._fd)
        self._output.close()
        self._folder.cleanup()

    def until(self, condition: Callable[[], T | None]) -> T:
        """Listen to the ranks until a condition holds, and return its value.

        Raises:
            JobError: It does not hold in time, or a process has ended.
        """
        end = time.monotonic() + LIMIT_S
        while True:
            self._listen()
            if (found := condition()) is not None:
                return found
            if any(process.poll() is not None for process in self._processes):
                raise self._failure("a launcher has ended")
            if time.monotonic() > end:
                raise self._failure(f"it does not go on within {LIMIT_S:.0f} s")
            time.sleep(LOOK_S)

    def listen_for(self, seconds: float) -> None:
        """Listen to the ranks for so long."""
        end = time.monotonic() + seconds
        self.until(lambda: True if time.monotonic() >= end else None)

    def _listen(self) -> None:
        data = os.pread(self._fd, os.fstat(self._fd).st_size - self._read_nbytes, self._read_nbytes)
        whole = data[: data.rfind(b"\n") + 1]
        self._read_nbytes += len(whole)
        self.said += read(whole)

    def _failure(self, text: str) -> JobError:
        self._output.seek(0)
        tail = self._output.read().decode(errors="replace").strip()[-3000:]
        return JobError(f"{self.launch.variant}: {text}; it wrote:\n{tail}")
