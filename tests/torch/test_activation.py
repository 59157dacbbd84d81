"""`import torch` alone makes "smddp" known, quickly, and never fails because of us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from sdp_plugins import _activate
from tests.ranks import HANG_S
from tests.side_by_side import side_by_side

KNOWN = "import torch.distributed as d; print('smddp' in d.Backend.backend_list)"


def fresh(code: str, env: Mapping[str, str] | None = None) -> str:
    """What a fresh interpreter prints."""
    environment = {**os.environ, **(env or {})}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def all_fresh(*calls: tuple[Any, ...]) -> list[str]:
    """What several fresh interpreters print."""
    return side_by_side(fresh, calls, at_once=2)


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
    light = ("config", "environment", "errors", "open_groups", "wire_dtype")
    allowed |= {f"sdp_plugins.core.{name}" for name in light}
    allowed |= {f"sdp_plugins.torch{name}" for name in ("", ".backend", ".backend_name")}
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
    off = {"SDP_AUTOLOAD": "0"}
    later = (KNOWN + "; import sdp_plugins.torch; " + KNOWN, off)
    at_first = ("import sdp_plugins.torch; " + KNOWN, off)
    assert all_fresh(later, at_first) == ["False\nTrue", "True"]


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
    import json, os, torch.distributed as dist
    known, told = "smddp" in dist.Backend.backend_list, {}
    settings = [name for name in os.environ if os.environ[name] == "soon"]
    for asked in settings:
        os.environ.update(dict.fromkeys(settings, "1"))
        os.environ[asked] = "soon"
        try:
            dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
        except ValueError as error:
            told[asked] = str(error)
    print(json.dumps([known, told]))
"""


def test_a_wrong_setting_is_told_when_a_group_is_made() -> None:
    names = ("SDP_TIMEOUT_S", "SDP_AUTOLOAD", "SDP_REGISTER")
    known, told = json.loads(fresh(ASK, dict.fromkeys(names, "soon")))
    assert known
    assert told.keys() == set(names)
    for name in names:
        assert f"{name}='soon'" in told[name]


def test_a_broken_installation_does_not_break_torch(tmp_path: Path) -> None:
    dependency, package = tmp_path / "dependency", tmp_path / "package"
    dependency.mkdir()
    (dependency / "wrapt.py").write_text("raise OSError('broken')")
    ours = package / "sdp_plugins"  # its entry point itself is there
    ours.mkdir(parents=True)
    (ours / "__init__.py").write_text("")
    (ours / "_activate.py").write_text(Path(_activate.__file__).read_text())
    code = "import sys; sys.path.insert(0, {!r}); import torch; print(torch.ones(1))"
    calls = [(code.format(str(path)),) for path in (dependency, package)]
    assert all_fresh(*calls) == ["tensor([1.])"] * 2


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


def importing(where: Path, imports: tuple[str, str], register: str) -> tuple[str]:
    first, second = imports
    return (LIGHTNING.format(path=str(where), register=register, first=first, second=second),)


def test_lightning_is_told_when_it_is_imported(tmp_path: Path) -> None:
    fake_lightning(tmp_path)
    register = "lambda module: print(module.__name__)"
    in_either_order = [importing(tmp_path, IMPORTS[::step], register) for step in (1, -1)]
    expected = "lightning.pytorch.strategies\nlightning.fabric.strategies\ndone"
    assert all_fresh(*in_either_order) == [expected] * 2
