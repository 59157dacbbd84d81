"""Four ways to train over smddp, under four launchers, and how a rank's failure ends a job."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version

import pytest
from packaging.version import Version

from tests.huggingface.jobs import HERE, Ended, Result, run, ways
from tests.ranks import free_port

pytest.importorskip("transformers")

SDP_RUN = ["-m", "sdp_plugins.launch", "run", "-n", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
SMDDPRUN = ["-m", "sdp_plugins.launch.smddprun", "-n", "2", sys.executable]
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
TRAINER = ["smddp", "smddp", "MULTI_CPU", "DISTRIBUTED"]
ACCELERATOR = ["smddp", "smddp", "MULTI_CPU", "DistributedDataParallel"]


def curve(job: Ended, way: str, found: list[str]) -> tuple[list[float], str]:
    """The losses and the weights of one way, which are those of both ranks."""
    results = job.results().get(way, [])
    assert [(r.rank, r.world) for r in results] == [(0, 2), (1, 2)], job.output
    assert [r.found for r in results] == [found] * 2
    first, second = results
    assert same(first) == same(second)
    assert len(first.losses) == 4
    return same(first)


def same(result: Result) -> tuple[list[float], str]:
    return result.losses, result.digest


def test_sdp_run_and_a_rank_that_fails() -> None:
    over_gloo = ("trainer over gloo", "accelerator over gloo")
    ours = ("trainer", "trainer on cpu", "accelerator after init")
    job = ways(SDP_RUN, *ours, *over_gloo, "fail")
    by_trainer = curve(job, "trainer", TRAINER)
    assert by_trainer == curve(job, "trainer on cpu", TRAINER)
    assert by_trainer == curve(job, over_gloo[0], ["gloo", "gloo", *TRAINER[2:]])
    by_accelerator = curve(job, "accelerator after init", ACCELERATOR)
    assert by_accelerator == curve(job, over_gloo[1], ["gloo", "gloo", *ACCELERATOR[2:]])
    assert job.code != 0
    assert "ArithmeticError: a fault of the script" in job.output
    assert re.search(r"PeerLostError: \[rank 0/2\] .*rank 1", job.output), job.output


@pytest.mark.long
def test_torchrun() -> None:
    """Which `accelerate launch` starts as well."""
    job = ways(TORCHRUN, "trainer on cpu", "accelerator after init")
    assert job.code == 0, job.output
    curve(job, "trainer on cpu", TRAINER)
    curve(job, "accelerator after init", ACCELERATOR)


def test_accelerate_launch() -> None:
    port = f"--main_process_port={free_port()}"
    job = ways([*LAUNCH, port], "trainer", "accelerator on cpu")
    assert job.code == 0, job.output
    curve(job, "trainer", TRAINER)
    curve(job, "accelerator on cpu", ACCELERATOR)


def test_sagemakers_variables() -> None:
    sagemaker = {
        "SM_FRAMEWORK_PARAMS": '{"sagemaker_distributed_dataparallel_enabled":true,'
        '"sagemaker_instance_type":"ml.c5.18xlarge"}',
        "SM_HOSTS": '["algo-1"]',
        "SMDATAPARALLEL_USE_SINGLENODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    plain = ("trainer, plain", "trainer on cpu, plain", "accelerator, plain")
    job = ways(SMDDPRUN, *plain, environment=sagemaker)
    assert job.code == 0, job.output
    assert curve(job, plain[0], TRAINER) == curve(job, plain[1], TRAINER)
    curve(job, plain[2], ACCELERATOR)


def test_unmodified_scripts_under_smddprun() -> None:
    job = ways(SMDDPRUN, "trainer, plain", "accelerator, plain")
    assert job.code == 0, job.output
    curve(job, "trainer, plain", TRAINER)
    curve(job, "accelerator, plain", ACCELERATOR)


def test_ranks_that_train_alone_are_told() -> None:
    """Newer accelerate makes single processes of ranks on CPUs that name no backend."""
    script = str(HERE / "scripts" / "alone.py")
    job = run(*SDP_RUN, script)
    alone = Version(version("accelerate")) >= Version("1.11")  # older ones join them over gloo
    assert job.output.count(f"ranks {1 if alone else 2}\n") == 2, job.output
    for rank in (0, 1):
        assert (f"accelerate trains rank {rank} of 2 alone" in job.output) == alone
    registered = run(*SDP_RUN, script, "import", environment={"SDP_AUTOLOAD": "0"})
    assert registered.output.count("ranks 2\n") == 2, registered.output
    assert "accelerate trains" not in registered.output, registered.output
