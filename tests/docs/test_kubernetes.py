"""The page on Kubernetes: its manifests, and one pod."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer.main

from sdp_plugins.launch.cli import app
from sdp_plugins.launch.supervise import SAVE_GRACE_S
from tests.docs.manifests import MANIFESTS, PAGE, command, only_container, pods
from tests.doctor.machines import doctor, own_shared_memory
from tests.launch.jobs import HEADER, LAUNCHER, ROOT
from tests.ranks import HANG_S

POD = ["unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "--mount"]
MOUNT = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
CONTAINER = [*POD, "sh", "-c", MOUNT, "sh"]
"""A command is the first process, and has the shared memory of a container without a volume."""


def options_of(line: list[str]) -> dict[str, Any]:
    """What `sdp run` makes of a command line."""
    assert line[:2] == ["sdp", "run"]
    run: Any = typer.main.get_command(app)
    return dict(run.commands["run"].make_context("sdp run", line[2:]).params)


def bytes_of(quantity: str) -> int:
    number, unit = quantity[:-2], quantity[-2:]
    return int(number) * {"Mi": 2**20, "Gi": 2**30}[unit]


def test_the_page_has_three_kinds_of_jobs() -> None:
    kinds = {name: one["kind"] for name, one in MANIFESTS.items()}
    assert kinds == {
        "one-pod.yaml": "Job",
        "pytorchjob.yaml": "PyTorchJob",
        "mpijob.yaml": "MPIJob",
    }


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_of_ranks_have_shared_memory_and_limits(name: str) -> None:
    found = [pod for pod in pods(MANIFESTS[name]) if only_container(pod).get("resources")]
    assert len(found) == (2 if name == "pytorchjob.yaml" else 1)
    for pod in found:
        container = only_container(pod)
        (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
        assert mount == {"name": volume["name"], "mountPath": "/dev/shm"}
        assert volume["emptyDir"]["medium"] == "Memory"
        limits = container["resources"]["limits"]
        assert bytes_of(volume["emptyDir"]["sizeLimit"]) < bytes_of(limits["memory"])
        assert limits == container["resources"].get("requests", limits)


def test_one_pod_starts_a_rank_for_each_core_and_serves_metrics() -> None:
    job = MANIFESTS["one-pod.yaml"]["spec"]
    (pod,) = pods(job)
    container = only_container(pod)
    options = options_of(container["command"])
    assert options["command"] == ["train.py"]
    assert str(options["ranks"]) == container["resources"]["limits"]["cpu"]
    assert options["metrics_address"] == "0.0.0.0"
    port = options["metrics_port"]
    assert container["ports"] == [{"name": "metrics", "containerPort": port}]
    assert job["template"]["metadata"]["annotations"]["prometheus.io/port"] == str(port)
    assert pod["terminationGracePeriodSeconds"] > SAVE_GRACE_S
    (rule,) = (r["onExitCodes"] for r in job["podFailurePolicy"]["rules"] if "onExitCodes" in r)
    assert rule["containerName"] == container["name"]


def test_a_pytorchjob_starts_torchrun() -> None:
    from torch.distributed.run import get_args_parser

    specs = MANIFESTS["pytorchjob.yaml"]["spec"]["pytorchReplicaSpecs"]
    for spec in specs.values():
        container = only_container(spec["template"]["spec"])
        assert container["name"] == "pytorch"  # the operator looks for it
        program, *arguments = container["command"]
        assert program == "torchrun"
        assert get_args_parser().parse_args(arguments).training_script == "train.py"
    assert set(specs) == {"Master", "Worker"}


def test_an_mpijob_starts_sdp_run() -> None:
    spec = MANIFESTS["mpijob.yaml"]["spec"]
    options = options_of(command("mpijob.yaml"))
    assert options["hostfile"] == Path("/etc/mpi/hostfile")
    assert options["command"] == ["train.py"]
    worker = only_container(next(pods(spec["mpiReplicaSpecs"]["Worker"])))
    used = spec["slotsPerWorker"] * options["threads"]
    assert str(used) == worker["resources"]["limits"]["cpu"]


# ---- a container ---------------------------------------------------------------------------------


@pytest.fixture
def container() -> list[str]:
    """The beginning of a command line that runs in a container."""
    if os.geteuid() != 0 or subprocess.run([*CONTAINER, "true"], check=False).returncode:
        pytest.skip("namespaces are not allowed here")
    return CONTAINER


def write(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(HEADER + text)
    return str(path)


REDUCE = """
import torch, torch.distributed as dist
import sdp_plugins.torch
assert os.getppid() == 1
dist.init_process_group("smddp")
for shared in (False, True):
    tensor = torch.ones(24 * 2**20)  # 96 MiB
    if shared: sdp_plugins.torch.share(tensor)
    dist.all_reduce(tensor)
    assert tensor.min() == tensor.max() == 2
    print(dist.group.WORLD.last_path)
    room = os.statvfs("/dev/shm")
    assert room.f_blocks * room.f_frsize == 2**26 and room.f_bfree == room.f_blocks
dist.destroy_process_group()
"""


def test_a_container_with_64_mebibytes(container: list[str], tmp_path: Path) -> None:
    line = [*container, *LAUNCHER, "-n", "2", "--no-prefix", write(tmp_path, REDUCE)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["staged"] * 2 + ["zero-copy"] * 2


def test_doctor_as_the_page_calls_it() -> None:
    (line,) = re.findall(r"^kubectl exec \S+ -- sdp doctor (.*)$", PAGE, re.MULTILINE)
    setup = partial(own_shared_memory, b"size=64m") if os.geteuid() == 0 else None
    done = doctor(*line.split(), "--json", "--check", "dev-shm", setup=setup)
    (found,) = json.loads(done.stdout)["findings"]
    if setup:
        assert "emptyDir with medium: Memory" in found["remedy"]


@pytest.mark.parametrize(("saves", "code"), [(True, 0), (False, 143)])
def test_the_end_of_a_pod(container: list[str], tmp_path: Path, saves: bool, code: int) -> None:
    """`sdp run` is the first process of the container, which ignores signals without a handler."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" if saves else ""
    script = write(tmp_path, f"{handler}print('runs', flush=True)\ntime.sleep(600)")
    line = [*container, *LAUNCHER, "-n", "2", script]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as unshare:
        try:
            assert unshare.stdout
            for _ in range(2):
                assert unshare.stdout.readline().endswith("runs\n")
            children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text()
            os.kill(int(children), signal.SIGTERM)
            assert unshare.wait(HANG_S) == code
        finally:
            unshare.kill()
