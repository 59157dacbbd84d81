"""The strategies for `pytorch_lightning`; their arguments are those of DDPStrategy."""

from lightning_fabric.plugins.environments import TorchElasticEnvironment
from pytorch_lightning import callbacks, strategies

from sdp_plugins.lightning.elastic.strategy import SMDDPElasticStrategy as _ElasticForTrainer
from sdp_plugins.lightning.local import SMDDPLocalStrategy as _LocalForTrainer
from sdp_plugins.lightning.monitor import SMDDPMonitor as _MonitorForTrainer
from sdp_plugins.lightning.registry import install
from sdp_plugins.lightning.sharded import SMDDPShardedStrategy as _ShardedForTrainer
from sdp_plugins.lightning.strategy import SMDDPStrategy as _ForTrainer


class SMDDPStrategy(_ForTrainer, strategies.DDPStrategy):
    """DistributedDataParallel over smddp, for `pytorch_lightning`."""

    _elastic_environment = TorchElasticEnvironment


class SMDDPShardedStrategy(_ShardedForTrainer, strategies.DDPStrategy):
    """One copy of the weights per node, for `pytorch_lightning`."""

    _elastic_environment = TorchElasticEnvironment


class SMDDPLocalStrategy(_LocalForTrainer, strategies.DDPStrategy):
    """Local updates between nodes, for `pytorch_lightning`."""

    _elastic_environment = TorchElasticEnvironment


class SMDDPElasticStrategy(_ElasticForTrainer, strategies.DDPStrategy):
    """Ranks that may be lost, and others that join, for `pytorch_lightning`."""

    _elastic_environment = TorchElasticEnvironment


class SMDDPMonitor(_MonitorForTrainer, callbacks.Callback):
    """Logs this rank's communication, for `pytorch_lightning`."""


install(strategies, SMDDPStrategy, SMDDPShardedStrategy, SMDDPElasticStrategy, SMDDPLocalStrategy)
