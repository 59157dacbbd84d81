"""Lightning over the smddp backend.

With the package installed, `Trainer(strategy="smddp")` and `Fabric(strategy="smddp")` work in a
script that imports only Lightning, from `lightning` and from `pytorch_lightning` alike. To pass
arguments, make an object:

    from sdp_plugins.lightning import SMDDPStrategy

    Trainer(strategy=SMDDPStrategy(static_graph=True), accelerator="cpu", devices=2)

With SDP_AUTOLOAD=0 only objects work. `strategy="smddp_sharded"` and `SMDDPShardedStrategy` keep
one copy of the weights per node: see docs/sharding.md. `"smddp_elastic"` and
`SMDDPElasticStrategy`, for Trainer, go on when ranks are lost: see docs/elastic.md. `"smddp_local"`
and `SMDDPLocalStrategy`, for Trainer, average parameters between nodes now and then: see
docs/slow-networks.md. The callback `SMDDPMonitor` logs communication: see docs/monitoring.md.

Each Lightning package accepts only strategies and callbacks of its own. The names here are the
classes for the package that is already imported. Before any is imported, they are classes that
choose when they are called: the package imported by then, else an installed one, `lightning` before
`pytorch_lightning`. To name a package, or to subclass, import from:

| for                  | import the classes from                   |
|----------------------|-------------------------------------------|
| `lightning.pytorch`  | `sdp_plugins.lightning.pytorch`           |
| `lightning.fabric`   | `sdp_plugins.lightning.fabric`            |
| `pytorch_lightning`  | `sdp_plugins.lightning.standalone.pytorch`|
| `lightning_fabric`   | `sdp_plugins.lightning.standalone.fabric` |
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sdp_plugins.lightning import namespaces

if TYPE_CHECKING:
    from sdp_plugins.lightning.elastic.strategy import SMDDPElasticStrategy
    from sdp_plugins.lightning.local import SMDDPLocalStrategy
    from sdp_plugins.lightning.monitor import SMDDPMonitor
    from sdp_plugins.lightning.sharded import SMDDPShardedFabricStrategy, SMDDPShardedStrategy
    from sdp_plugins.lightning.strategy import SMDDPFabricStrategy, SMDDPStrategy

__all__ = [
    "SMDDPElasticStrategy",
    "SMDDPFabricStrategy",
    "SMDDPLocalStrategy",
    "SMDDPMonitor",
    "SMDDPShardedFabricStrategy",
    "SMDDPShardedStrategy",
    "SMDDPStrategy",
]

_PACKAGES = {
    name: namespaces.FABRIC if "Fabric" in name else namespaces.TRAINER for name in __all__
}


def __getattr__(name: str) -> Any:
    """Return the class for the Lightning package in use, which LightningCLI requires."""
    if name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if imported := namespaces.imported(_PACKAGES[name]):
        return namespaces.strategy_class(imported[0], name.replace("Fabric", ""))
    modules = {"Elastic": "elastic.strategy"}
    modules |= {kind: kind.lower() for kind in ("Sharded", "Local", "Monitor")}
    module = next((module for kind, module in modules.items() if kind in name), "strategy")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
