"""The Lightning packages, and the module with the classes for each."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

MODULES = {
    "lightning.pytorch": "sdp_plugins.lightning.pytorch",
    "pytorch_lightning": "sdp_plugins.lightning.standalone.pytorch",
    "lightning.fabric": "sdp_plugins.lightning.fabric",
    "lightning_fabric": "sdp_plugins.lightning.standalone.fabric",
}
TRAINER = ("lightning.pytorch", "pytorch_lightning")
FABRIC = ("lightning.fabric", "lightning_fabric")

LightningClass: Any = object
"""Base of a mixin: for type checkers, any class of a Lightning package may follow it."""


def strategy_class(package: str, name: str = "SMDDPStrategy") -> type:
    """The strategy for a Lightning package, or another class for it."""
    return getattr(importlib.import_module(MODULES[package]), name)


def concrete_class(packages: tuple[str, ...], name: str) -> type:
    """The class for the imported one of `packages`, else for the first installed one."""
    installed = (package for package in packages if is_installed(package))
    package = next(iter(imported(packages)), None) or next(installed, None)
    if package is None:
        raise ModuleNotFoundError(
            f"none of {', '.join(packages)} is installed. Hint: pip install sdp_plugins[lightning]"
        )
    return strategy_class(package, name)


def imported(packages: tuple[str, ...]) -> list[str]:
    """Those of `packages` that this process has imported."""
    return [package for package in packages if package in sys.modules]


def is_installed(package: str) -> bool:
    """Whether `package` can be imported; finds out without importing more than its parent."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
