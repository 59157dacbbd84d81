"""The strategy for `lightning_fabric`; its arguments are those of DDPStrategy."""

from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy  # type: ignore[attr-defined]

from sdp_plugins.lightning.strategy import SMDDPFabricStrategy


class SMDDPStrategy(SMDDPFabricStrategy, DDPStrategy):
    """DistributedDataParallel over smddp, for `lightning_fabric`."""

    _elastic_environment = TorchElasticEnvironment
