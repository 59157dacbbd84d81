"""The strategies for `lightning_fabric`; their arguments are those of DDPStrategy."""

from lightning_fabric import strategies
from lightning_fabric.plugins.environments import TorchElasticEnvironment

from sdp_plugins.lightning.registry import install
from sdp_plugins.lightning.sharded import SMDDPShardedFabricStrategy
from sdp_plugins.lightning.strategy import SMDDPFabricStrategy


class SMDDPStrategy(SMDDPFabricStrategy, strategies.DDPStrategy):
    """DistributedDataParallel over smddp, for `lightning_fabric`."""

    _elastic_environment = TorchElasticEnvironment


class SMDDPShardedStrategy(SMDDPShardedFabricStrategy, strategies.DDPStrategy):
    """One copy of the weights per node, for `lightning_fabric`."""

    _elastic_environment = TorchElasticEnvironment


install(strategies, SMDDPStrategy, SMDDPShardedStrategy)
