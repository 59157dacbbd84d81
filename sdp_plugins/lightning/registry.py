"""Registers the strategies with the Lightning packages, and mends their MPI detection."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import Any

from sdp_plugins.core.config import autoload
from sdp_plugins.lightning.namespaces import MODULES

log = logging.getLogger(__name__)


def register(module: ModuleType) -> None:
    """Register smddp with a Lightning package, once its `<package>.strategies` is imported.

    Never raises: it runs during the import of Lightning, which must succeed in any case.
    """
    try:
        package = module.__name__.removesuffix(".strategies")
        importlib.import_module(MODULES[package])  # it calls `install`
    except Exception:
        log.warning("strategy='smddp' is not available in %s", module.__name__, exc_info=True)


def install(
    module: ModuleType,
    strategy: type,
    sharded: type,
    elastic: type | None = None,
    local: type | None = None,
) -> None:
    """Make a package's strategies those of smddp's names; SDP_AUTOLOAD=0 leaves the names out."""
    survive_missing_mpi(module.__name__.removesuffix(".strategies"))
    if autoload():
        add_names(module, strategy, sharded, elastic, local)


def add_names(
    module: Any, strategy: type, sharded: type, elastic: type | None, local: type | None
) -> None:
    """Register a name such as "smddp_spawn" for every name of DDPStrategy, such as "ddp_spawn".

    And one such as "smddp_sharded_spawn", unless it has arguments of DistributedDataParallel; and
    those such as "smddp_elastic" and "smddp_local", unless the first rank starts the others.
    """
    registry = getattr(module, "StrategyRegistry", None)
    if registry is None:
        registry = module.STRATEGY_REGISTRY
    for name, entry in list(registry.items()):
        if entry["strategy"] is not module.DDPStrategy:
            continue
        ours = {"smddp": (strategy, "SMDDP")}
        if "find_unused_parameters" not in entry["init_params"]:
            ours["smddp_sharded"] = (sharded, "SMDDPSharded")
        starts_programs = entry["init_params"].get("start_method") == "popen"
        if elastic is not None and starts_programs:
            ours["smddp_elastic"] = (elastic, "SMDDPElastic")
        if local is not None and starts_programs:
            ours["smddp_local"] = (local, "SMDDPLocal")
        for prefix, (kind, described) in ours.items():
            new = name.replace("ddp", prefix, 1)
            if new not in registry:
                description = entry["description"].replace("DDP", described, 1)
                registry.register(new, kind, description, **entry["init_params"])


def survive_missing_mpi(package: str) -> None:
    """Let Lightning continue when mpi4py is installed without an MPI library.

    Every Trainer and Fabric calls `MPIEnvironment.detect()` before it reads its strategy. The call
    should return False without MPI, but it expects an ImportError where mpi4py raises RuntimeError,
    so the job ends, whatever its strategy. The class is patched for the whole process, because the
    strategy is not known at the call; only this result changes.
    """
    fabric = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
    module = importlib.import_module(f"{fabric.get(package, package)}.plugins.environments.mpi")
    environment = module.MPIEnvironment
    detect = environment.detect
    if hasattr(detect, "__wrapped__"):
        return

    @functools.wraps(detect)
    def detect_or_go_on() -> bool:
        try:
            return bool(detect())
        except RuntimeError as error:
            log.info("MPI is not used: mpi4py is installed, but %s", error)
            return False

    environment.detect = staticmethod(detect_or_go_on)
