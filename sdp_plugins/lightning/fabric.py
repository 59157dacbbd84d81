"""The strategy for `lightning.fabric`; its arguments are those of DDPStrategy."""

from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy

from sdp_plugins.lightning.strategy import SMDDPFabricStrategy


class SMDDPStrategy(SMDDPFabricStrategy, DDPStrategy):
    """DistributedDataParallel over smddp, for `lightning.fabric`."""

    _elastic_environment = TorchElasticEnvironment
