"""Registers the names for `Trainer(strategy=...)` and `Fabric(strategy=...)`."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import Any

from sdp_plugins.core.config import autoload
from sdp_plugins.lightning.missing_mpi import survive_missing_mpi
from sdp_plugins.lightning.namespaces import MODULES

log = logging.getLogger(__name__)


def register(module: ModuleType) -> None:
    """Register smddp with a Lightning package, once its `<package>.strategies` is imported.

    Never raises: it runs during the import of Lightning, which must succeed in any case.

    Args:
        module: `lightning.pytorch.strategies`, or that of another Lightning package.
    """
    try:
        package = module.__name__.removesuffix(".strategies")
        importlib.import_module(MODULES[package])  # it calls `install`
    except Exception:
        log.warning("strategy='smddp' is not available in %s", module.__name__, exc_info=True)


def install(module: ModuleType, strategy: type) -> None:
    """Make `strategy` the smddp of a Lightning package; SDP_AUTOLOAD=0 leaves its names out.

    Args:
        module: `<package>.strategies`.
        strategy: The package's SMDDPStrategy.
    """
    survive_missing_mpi(module.__name__.removesuffix(".strategies"))
    if autoload():
        add_names(module, strategy)


def add_names(module: Any, strategy: type) -> None:
    """Register a name such as "smddp_spawn" for every name of DDPStrategy, such as "ddp_spawn"."""
    registry = getattr(module, "StrategyRegistry", None)
    if registry is None:
        registry = module.STRATEGY_REGISTRY
    for name, entry in list(registry.items()):
        ours = name.replace("ddp", "smddp", 1)
        if entry["strategy"] is module.DDPStrategy and ours not in registry:
            description = entry["description"].replace("DDP", "SMDDP", 1)
            registry.register(ours, strategy, description, **entry["init_params"])
