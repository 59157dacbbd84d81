"""The strategy for `pytorch_lightning`; its arguments are those of DDPStrategy."""

from lightning_fabric.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy

from sdp_plugins.lightning.strategy import SMDDPStrategy as _ForTrainer


class SMDDPStrategy(_ForTrainer, DDPStrategy):
    """DistributedDataParallel over smddp, for `pytorch_lightning`."""

    _elastic_environment = TorchElasticEnvironment
