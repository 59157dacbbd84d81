"""Functions are patched only in checked versions, and never with SDP_HUGGINGFACE=0."""

from __future__ import annotations

import itertools
import logging
import os
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate.state import DistributedType, PartialState
from packaging.specifiers import SpecifierSet

from sdp_plugins import huggingface
from sdp_plugins.core.config import (
    patches_huggingface,
    sagemaker_wants_smddp,
    take_sagemaker_flag,
)
from sdp_plugins.huggingface import backend_choice
from sdp_plugins.huggingface.backend_choice import CHECKED
from sdp_plugins.torch import mpi_environment
from tests.huggingface.jobs import ROOT, run
from tests.ranks import free_port
from tests.side_by_side import side_by_side

SAGEMAKER = '{"sagemaker_distributed_dataparallel_enabled": true}'


def choose(self: Any, cpu: Any = False, sagemaker_dp: Any = False, backend: Any = None) -> Any:
    """Looks like accelerate's, as far as it is looked at."""
    known = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, "gloo", "smddp")
    return known[0], backend


def other(self: Any, cpu: Any = False, backend: Any = None) -> Any:
    """Has other parameters."""
    return choose(self, cpu, False, backend)


def state_module(function: Any) -> Any:
    """A module like `accelerate.state`."""
    module = ModuleType("accelerate.state")
    module.PartialState = type("PartialState", (), {"_prepare_backend": function})  # type: ignore[attr-defined]
    module.DistributedType = DistributedType  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("version", "function", "patched"),
    [
        ("1.15.0", choose, True),
        ("1.15.1.dev0", choose, True),
        ("1.3.0", choose, True),
        ("1.2.1", choose, False),
        ("1.16.0", choose, False),
        ("2.0", choose, False),
        ("1.15.0", other, False),
    ],
)
def test_only_what_was_checked_is_mended(
    version: str,
    function: Any,
    patched: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", SimpleNamespace(__version__=version))
    module = state_module(function)
    huggingface.patch(module)
    assert not caplog.records  # whoever has nothing to do with smddp is left in peace
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(mpi_environment, "set_torchs_variables", lambda: None)
    state = SimpleNamespace(device=None, default_device=SimpleNamespace(type="cpu"))
    for backend in ("gloo", "smddp"):
        found = module.PartialState._prepare_backend(state, False, backend=backend)
    assert (found == ("smddp", DistributedType.MULTI_CPU)) == patched
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == (not patched)
    for text in told:
        assert text.startswith(
            "smddp does not patch PartialState._prepare_backend (state.py) of accelerate "
        )
        assert "SDP_HUGGINGFACE=0" in text


def test_a_second_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", SimpleNamespace(__version__="1.15.0"))
    module = state_module(choose)
    huggingface.patch(module)
    once = module.PartialState._prepare_backend
    huggingface.patch(module)
    assert module.PartialState._prepare_backend is once


def test_the_command_line_offers_smddp() -> None:
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser(TrainingArguments)
    given = ["--output_dir", "out", "--ddp_backend", "smddp"]
    assert parser.parse_args(given).ddp_backend == "smddp"


def test_a_fault_does_not_break_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_choice, "patch", lambda module: 1 / 0)
    huggingface.patch(state_module(choose))


def test_other_backends_are_chosen_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = PartialState._prepare_backend
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for local_rank, cpu, backend in itertools.product(
        ("1", "-1"), (True, False), (None, "gloo", "nccl", "mpi")
    ):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        state = SimpleNamespace(device=None, default_device=SimpleNamespace(type="cpu"))
        theirs = patched.__wrapped__(state, cpu, False, backend)
        assert patched(state, cpu, False, backend) == theirs


@pytest.mark.parametrize(
    ("launched", "sagemaker", "device", "cpu", "backend", "chosen"),
    [
        (True, "", "cpu", False, "smddp", True),
        (True, "", "cpu", True, "smddp", True),
        (True, "", "cuda", True, "smddp", True),  # use_cpu on a machine with GPUs
        (True, "", "cuda", False, "smddp", False),
        (False, "", "cpu", True, "smddp", False),
        (True, SAGEMAKER, "cpu", False, None, True),
        (True, SAGEMAKER, "cpu", True, None, True),
        (True, SAGEMAKER, "cpu", True, "gloo", False),
        (True, SAGEMAKER, "cuda", False, None, False),
        (False, SAGEMAKER, "cpu", False, None, False),
        (True, "", "cpu", False, None, False),
    ],
)
def test_when_smddp_is_chosen(
    launched: bool,
    sagemaker: str,
    device: str,
    cpu: bool,
    backend: str | None,
    chosen: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
        if launched:
            monkeypatch.setenv(name, "2" if "SIZE" in name else "0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", sagemaker)
    monkeypatch.setattr(mpi_environment, "set_torchs_variables", lambda: None)
    patched = backend_choice.choosing(lambda *given: ("gloo", "cpus"), "cpus")
    state = SimpleNamespace(device=None, default_device=SimpleNamespace(type=device))
    assert patched(state, cpu, False, backend) == ("smddp" if chosen else "gloo", "cpus")


@pytest.mark.parametrize("group", ["smddp", "cpu:smddp", "cpu:smddp,cuda:nccl", "gloo"])
def test_a_group_that_the_script_has_made(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_choice.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(backend_choice.dist, "get_backend", lambda: group)
    assert backend_choice.is_meant(False, None) == (group != "gloo")


def test_settings() -> None:
    assert patches_huggingface({})
    assert patches_huggingface({"SDP_HUGGINGFACE": "soon"})  # Config.from_env refuses it
    assert not patches_huggingface({"SDP_HUGGINGFACE": "off"})
    assert sagemaker_wants_smddp({"SM_FRAMEWORK_PARAMS": SAGEMAKER})
    for text in ("", "{}", "[1]", "{", SAGEMAKER.replace("true", "false")):
        assert not sagemaker_wants_smddp({"SM_FRAMEWORK_PARAMS": text})


def test_the_extra_installs_what_is_patched() -> None:
    (line,) = re.findall(r'"accelerate(>=.*)"', (ROOT / "pyproject.toml").read_text())
    assert SpecifierSet(line) == CHECKED


def test_the_flag_is_taken_from_sagemakers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer looks at it, and would pass device_ids to DDP."""
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", SAGEMAKER.replace("{", '{"kept": 1, '))
    take_sagemaker_flag()
    assert os.environ["SM_FRAMEWORK_PARAMS"] == '{"kept": 1}'
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", "[1")
    take_sagemaker_flag()
    assert os.environ["SM_FRAMEWORK_PARAMS"] == "[1"


def test_accelerate_alone_does_not_load_the_backend() -> None:
    code = "import accelerate, sys; print('loaded', [m for m in sys.modules if 'sdp_' in m])"
    (found,) = re.findall("loaded (.*)", run("-c", code).output)
    assert "'sdp_plugins.huggingface.backend_choice'" in found
    assert "sdp_plugins.torch.process_group" not in found
    assert "_native" not in found


ERRORS = """if True:
    import tempfile, torch
    from accelerate.state import AcceleratorState, PartialState

    def error_of(function):
        AcceleratorState._reset_state(True)
        try:
            function()
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        else:
            print("none")

    error_of(lambda: PartialState(cpu=True, backend="smddp"))
    error_of(lambda: PartialState(_use_sagemaker_dp=True))
"""
DEVICE_IDS = """
    import os
    from tests.huggingface.training import trainer
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # which gets it further
    error_of(lambda: trainer(tempfile.gettempdir(), max_steps=1).train())
"""


def errors(code: str, setting: str) -> list[str]:
    """What upstream says in a job of one rank in which something is switched off."""
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    sagemaker = {"SM_FRAMEWORK_PARAMS": SAGEMAKER, "SMDATAPARALLEL_LOCAL_RANK": "0"}
    own = {"MASTER_PORT": str(free_port()), setting: "0"}
    ended = run("-c", code, environment={**job, **sagemaker, **own})
    return [line for line in ended.output.splitlines() if re.match(r"\w+Error: |none$", line)]


def test_the_switches_bring_upstreams_errors_back() -> None:
    calls = [(ERRORS + DEVICE_IDS, "SDP_HUGGINGFACE"), (ERRORS, "SDP_AUTOLOAD")]
    found_all = side_by_side(errors, calls, at_once=2)
    assert [len(found) for found in found_all] == [3, 2]
    for found in found_all:
        assert re.search("backend smddp is not .* please use gloo", found[0])
        assert found[1].startswith("ZeroDivisionError")
        for text in found[2:]:
            assert "device_ids and output_device arguments only work with" in text
