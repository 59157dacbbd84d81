"""Lightning over the smddp backend.

With the package installed, `Trainer(strategy="smddp")` and `Fabric(strategy="smddp")` work in a
script that imports only Lightning, from `lightning` and from `pytorch_lightning` alike. Objects are
for arguments:

    from sdp_plugins.lightning import SMDDPStrategy

    Trainer(strategy=SMDDPStrategy(static_graph=True), accelerator="cpu", devices=2)

With SDP_AUTOLOAD=0 only objects work.

Every Lightning package has classes of its own, and its Trainer takes only its own. The two names
here make an object for the package that is imported when they are called, else for the one that is
installed, `lightning` before `pytorch_lightning`. To name one, or to subclass, import from:

| for                  | import SMDDPStrategy from                 |
|----------------------|-------------------------------------------|
| `lightning.pytorch`  | `sdp_plugins.lightning.pytorch`           |
| `lightning.fabric`   | `sdp_plugins.lightning.fabric`            |
| `pytorch_lightning`  | `sdp_plugins.lightning.standalone.pytorch`|
| `lightning_fabric`   | `sdp_plugins.lightning.standalone.fabric` |
"""

from sdp_plugins.lightning.strategy import SMDDPFabricStrategy, SMDDPStrategy

__all__ = ["SMDDPFabricStrategy", "SMDDPStrategy"]
