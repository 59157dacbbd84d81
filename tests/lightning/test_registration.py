"""Names, classes and their choice; nothing here starts a rank."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import sdp_plugins.lightning
from sdp_plugins.lightning import namespaces, registry
from sdp_plugins.lightning.namespaces import FABRIC, MODULES, TRAINER, strategy_class
from sdp_plugins.lightning.strategy import SMDDPFabricStrategy, SMDDPStrategy
from sdp_plugins.torch import Options

VARIANTS = [
    f"{start}{unused}"
    for start in ("smddp", "smddp_spawn", "smddp_fork", "smddp_notebook")
    for unused in ("", "_find_unused_parameters_false", "_find_unused_parameters_true")
]


def strategies(package: str) -> Any:
    """The module that holds a Lightning package's strategies and their registry."""
    return importlib.import_module(f"{package}.strategies")


def names(package: str) -> Any:
    """A Lightning package's registry."""
    module = strategies(package)
    return getattr(module, "StrategyRegistry", None) or module.STRATEGY_REGISTRY


@pytest.mark.parametrize("package", TRAINER)
def test_trainer_knows_every_variant(package: str) -> None:
    assert set(VARIANTS) <= set(names(package))
    for name in VARIANTS:
        strategy, lightnings = names(package).get(name), names(package).get(name[2:])
        assert type(strategy) is strategy_class(package)
        assert strategy._start_method == lightnings._start_method
        assert strategy._ddp_kwargs == lightnings._ddp_kwargs
    for start in "", "_spawn", "_fork", "_notebook":
        strategy = names(package).get(f"smddp_sharded{start}")
        assert type(strategy) is strategy_class(package, "SMDDPShardedStrategy")
        assert strategy._start_method == names(package).get(f"ddp{start}")._start_method
    for kind in "Elastic", "Local":
        start = f"smddp_{kind.lower()}"
        found = {name for name in names(package) if name.startswith(start)}
        unused = f"{start}_find_unused_parameters"
        assert found == {start, f"{unused}_false", f"{unused}_true"}
        for name in found:
            strategy = names(package).get(name)
            assert type(strategy) is strategy_class(package, f"SMDDP{kind}Strategy")


@pytest.mark.parametrize("package", FABRIC)
def test_fabric_knows_the_variants_of_ddp(package: str) -> None:
    ours = {name for name in names(package) if name.startswith("smddp")}
    module = strategies(package)
    ddp = {name for name, data in names(package).items() if data["strategy"] is module.DDPStrategy}
    started = {name for name in ddp if "unused" not in name}
    sharded = {name.replace("ddp", "smddp_sharded", 1) for name in started}
    assert ours == {f"sm{name}" for name in ddp} | sharded
    assert "smddp" in ours


@pytest.mark.parametrize("package", MODULES)
def test_registering_again_changes_nothing(package: str) -> None:
    before = dict(names(package))
    registry.register(strategies(package))
    assert dict(names(package)) == before


def test_the_names_cost_no_process_group() -> None:
    """Every program that imports Lightning pays for what the names import."""
    script = """
import sys, lightning.pytorch, pytorch_lightning
print(sorted({"sdp_plugins.core._native", "sdp_plugins.torch.process_group"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("package", ["lightning.pytorch", "lightning_fabric"])
def test_our_module_may_be_imported_before_lightning(package: str) -> None:
    script = f"""
import {MODULES[package]}, {package}.strategies as strategies
names = getattr(strategies, "StrategyRegistry", None) or strategies.STRATEGY_REGISTRY
print("smddp" in names)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, "not available" in done.stderr) == ("True\n", False), done.stderr


def test_without_autoload_there_are_no_names_but_the_strategy_works() -> None:
    script = """
import sdp_plugins.lightning.pytorch
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.pytorch.strategies import StrategyRegistry
print("smddp" in StrategyRegistry, hasattr(MPIEnvironment.detect, "__wrapped__"))
"""
    env = {**os.environ, "SDP_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout == "False True\n", done.stderr


@pytest.mark.parametrize("package", MODULES)
def test_strategies_are_of_their_package(package: str) -> None:
    cls = strategy_class(package)
    assert issubclass(cls, strategies(package).DDPStrategy)
    assert issubclass(cls, SMDDPStrategy if package in TRAINER else SMDDPFabricStrategy)
    strategy = cls(static_graph=True)
    assert strategy.process_group_backend == "smddp"
    assert strategy._ddp_kwargs == {"static_graph": True}
    assert type(pickle.loads(pickle.dumps(strategy))) is cls


def test_a_broken_lightning_is_imported_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "MODULES", {"lightning.pytorch": "sdp_plugins.no_such_module"})
    with caplog.at_level(logging.WARNING):
        registry.register(ModuleType("lightning.pytorch.strategies"))
    assert "strategy='smddp' is not available in lightning.pytorch.strategies" in caplog.text


def test_a_name_that_is_taken_is_left_alone() -> None:
    module: Any = ModuleType("some.strategies")
    lightning = strategies("lightning.pytorch")
    module.DDPStrategy, module.StrategyRegistry = lightning.DDPStrategy, type(names(TRAINER[0]))()
    module.StrategyRegistry.register("ddp", lightning.DDPStrategy)
    module.StrategyRegistry.register("smddp", lightning.FSDPStrategy)
    mine = [
        strategy_class("lightning.pytorch", f"SMDDP{kind}Strategy")
        for kind in ("", "Sharded", "Elastic", "Local")
    ]
    registry.add_names(module, *mine)
    assert module.StrategyRegistry["smddp"]["strategy"] is lightning.FSDPStrategy


@pytest.mark.parametrize(
    ("imported", "chosen"),
    [
        (("lightning.pytorch",), "lightning.pytorch"),
        (("pytorch_lightning",), "pytorch_lightning"),
        (TRAINER, "lightning.pytorch"),
    ],
)
def test_the_imported_package_is_chosen(
    monkeypatch: pytest.MonkeyPatch, imported: tuple[str, ...], chosen: str
) -> None:
    expected = strategy_class(chosen)
    modules = {name: module for name, module in sys.modules.items() if name not in TRAINER}
    modules |= {name: ModuleType(name) for name in imported}
    monkeypatch.setattr(namespaces.sys, "modules", modules)
    assert type(SMDDPStrategy(find_unused_parameters=True)) is expected


def test_the_name_is_the_class_of_the_imported_package(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: module for name, module in sys.modules.items() if name not in MODULES}
    for name in sdp_plugins.lightning.__all__:
        for package in FABRIC if "Fabric" in name else TRAINER:
            expected = strategy_class(package, name.replace("Fabric", ""))
            with monkeypatch.context() as context:
                context.setattr(namespaces.sys, "modules", others | {package: ModuleType(package)})
                assert getattr(sdp_plugins.lightning, name) is expected
    monkeypatch.setattr(namespaces.sys, "modules", others)
    assert sdp_plugins.lightning.SMDDPStrategy is SMDDPStrategy


@pytest.mark.parametrize("installed", TRAINER)
def test_the_installed_package_is_chosen(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    expected = strategy_class(installed)
    classes = {(installed, "SMDDPStrategy"): expected}
    monkeypatch.setattr(namespaces.sys, "modules", {})
    monkeypatch.setattr(namespaces, "is_installed", lambda package: package == installed)
    monkeypatch.setattr(namespaces, "strategy_class", lambda package, name: classes[package, name])
    assert type(SMDDPStrategy()) is expected


@pytest.mark.parametrize("package", MODULES)
def test_a_gpu_is_refused_where_weights_are_sharded(package: str) -> None:
    kind: Any = strategy_class(package, "SMDDPShardedStrategy")
    strategy = kind(parallel_devices=[torch.device("cuda", 0)])
    with pytest.raises(ValueError, match="Hint: accelerator='cpu'"):
        strategy._configure_launcher()


@pytest.mark.parametrize("package", TRAINER)
def test_a_notebook_is_told_of_our_variant(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    trainer = importlib.import_module(package).Trainer
    for strategy in ("smddp", "smddp_spawn"):
        with pytest.raises(RuntimeError, match="strategy='smddp_notebook'"):
            trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)


def test_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "modules", {})
    monkeypatch.setattr(namespaces, "is_installed", lambda package: False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install sdp_plugins\[lightning\]"):
        SMDDPFabricStrategy()


def test_another_backend_is_refused() -> None:
    assert SMDDPStrategy(process_group_backend="smddp").process_group_backend == "smddp"
    with pytest.raises(ValueError, match="use Lightning's DDPStrategy"):
        SMDDPStrategy(process_group_backend="gloo")


def test_subclasses_need_a_package() -> None:
    class Mine(SMDDPStrategy):
        pass

    with pytest.raises(TypeError, match="subclass the SMDDPStrategy of one Lightning package"):
        Mine()

    class Right(strategy_class("lightning.pytorch")):
        pass

    assert isinstance(Right(), SMDDPStrategy)


@pytest.mark.parametrize("path", [*(MODULES[p] for p in TRAINER), "sdp_plugins.lightning"])
def test_lightning_cli_knows_the_arguments(path: str) -> None:
    package = "pytorch_lightning" if "standalone" in path else "lightning.pytorch"
    cli: Any = importlib.import_module(f"{package}.cli")
    trainer = importlib.import_module(package).Trainer
    parser = cli.LightningArgumentParser()
    parser.add_class_arguments(trainer, "trainer")

    def made_by(name: str, **given: str) -> Any:
        line = [f"--trainer.strategy={path}.{name}"]
        line += [f"--trainer.strategy.{name}={value}" for name, value in given.items()]
        return parser.instantiate_classes(parser.parse_args(line)).trainer.strategy

    given = {"find_unused_parameters": "true", "bucket_cap_mb": "3", "timeout": "0:01:00"}
    made = made_by("SMDDPStrategy", wire_dtype="int8", **given)
    assert type(made) is strategy_class(package)
    assert made.process_group_backend == "smddp"
    assert made._timeout.total_seconds() == 60
    assert made._ddp_kwargs["find_unused_parameters"] is True
    assert made._ddp_kwargs["bucket_cap_mb"] == 3
    assert made._options == Options("int8")
    sharded = made_by("SMDDPShardedStrategy", master_weights="true", timeout="0:01:00")
    assert sharded._master_weights is True and sharded._timeout.total_seconds() == 60
