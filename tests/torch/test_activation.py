"""`import torch` alone makes "smddp" known, quickly, and never fails because of us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from sdp_plugins import _activate

KNOWN = "import torch.distributed as d; print('smddp' in d.Backend.backend_list)"


def fresh(code: str, path: Path | None = None, **env: str) -> str:
    """What a fresh interpreter prints."""
    environment = os.environ | env
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("group", ["torch.backends", "torch.distributed.backends"])
def test_entry_points(group: str) -> None:
    (entry,) = entry_points(group=group, name="sdp_plugins")
    assert entry.value == "sdp_plugins._activate:activate"


def test_import_torch_is_enough() -> None:
    code = """if True:
        import json, sys, torch
        heavy = [m for m in sys.modules if m.startswith("sdp_plugins") or "lightning" in m]
        known = "smddp" in torch.distributed.Backend.backend_list
        print(json.dumps([known, "smddp" == torch.distributed.Backend.SMDDP, heavy]))
    """
    known, named, imported = json.loads(fresh(code))
    assert known
    assert named
    allowed = {"sdp_plugins", "sdp_plugins._activate", "sdp_plugins.core"}
    allowed |= {"sdp_plugins.core.config", "sdp_plugins.core.errors"}
    assert set(imported) <= allowed


def test_a_job_that_imports_nothing_but_torch(rank_pool: Any) -> None:
    code = """if True:
        import torch, torch.distributed as dist
        def main(rank, world):
            dist.init_process_group("smddp")
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            dist.destroy_process_group()
            return tensor.tolist()
    """
    assert rank_pool(2).run(code) == [[2.0] * 3] * 2


def test_the_switch() -> None:
    explicit = KNOWN + "; import sdp_plugins.torch; " + KNOWN
    assert fresh(explicit, SDP_AUTOLOAD="0").split() == ["False", "True"]
    assert fresh("import sdp_plugins.torch; " + KNOWN, SDP_AUTOLOAD="0") == "True"


def test_twice_is_once() -> None:
    code = """if True:
        import torch, sdp_plugins._activate as a
        before = dict(torch.distributed.Backend._plugins)
        a.activate(); import sdp_plugins.torch; a.activate()
        print(before == torch.distributed.Backend._plugins,
              torch.distributed.Backend.backend_list.count("smddp"))
    """
    assert fresh(code) == "True 1"


ASK = """if True:
    import torch.distributed as dist
    try:
        dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize("name", ["SDP_TIMEOUT_S", "SDP_AUTOLOAD", "SDP_REGISTER"])
def test_a_wrong_setting_is_told_when_a_group_is_made(name: str) -> None:
    assert fresh(KNOWN, **{name: "soon"}) == "True"
    assert f"{name}='soon'" in fresh(ASK, **{name: "soon"})


@pytest.mark.parametrize("broken", ["wrapt", "sdp_plugins"])
def test_a_broken_installation_does_not_break_torch(broken: str, tmp_path: Path) -> None:
    if broken == "sdp_plugins":  # its entry point itself is there
        package = tmp_path / "sdp_plugins"
        package.mkdir()
        (package / "__init__.py").write_text("")
        source = Path(_activate.__file__).read_text()
        (package / "_activate.py").write_text(source)
    else:
        (tmp_path / "wrapt.py").write_text("raise OSError('broken')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch; print(torch.ones(1))"
    assert fresh(code) == "tensor([1.])"


def fake_lightning(where: Path) -> None:
    """A package with Lightning's names that says what was registered with it."""
    for name in ("lightning/pytorch/strategies", "lightning/fabric/strategies"):
        package = where / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package.parent / "__init__.py").write_text("")
    (where / "lightning/__init__.py").write_text("")


LIGHTNING = """if True:
    import sys, types
    sys.path.insert(0, {path!r})
    registry = types.ModuleType("sdp_plugins.lightning.registry")
    registry.register = {register}
    sys.modules["sdp_plugins.lightning"] = types.ModuleType("sdp_plugins.lightning")
    sys.modules["sdp_plugins.lightning.registry"] = registry
    {first}
    {second}
    print("done")
"""
IMPORTS = ("import torch", "import lightning.pytorch.strategies, lightning.fabric.strategies")


@pytest.mark.parametrize("order", [1, -1], ids=["torch first", "lightning first"])
def test_lightning_is_told_when_it_is_imported(tmp_path: Path, order: int) -> None:
    fake_lightning(tmp_path)
    first, second = IMPORTS[::order]
    register = "lambda module: print(module.__name__)"
    code = LIGHTNING.format(path=str(tmp_path), register=register, first=first, second=second)
    expected = ["lightning.pytorch.strategies", "lightning.fabric.strategies", "done"]
    assert fresh(code).splitlines() == expected


def test_a_broken_strategy_does_not_break_lightning(tmp_path: Path) -> None:
    fake_lightning(tmp_path)
    first, second = IMPORTS
    register = "lambda module: 1 / 0"
    code = LIGHTNING.format(path=str(tmp_path), register=register, first=first, second=second)
    assert fresh(code) == "done"
