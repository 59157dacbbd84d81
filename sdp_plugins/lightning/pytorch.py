"""The strategies for `lightning.pytorch`; their arguments are those of DDPStrategy."""

from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import callbacks, strategies

from sdp_plugins.lightning.elastic.strategy import SMDDPElasticStrategy as _ElasticForTrainer
from sdp_plugins.lightning.local import SMDDPLocalStrategy as _LocalForTrainer
from sdp_plugins.lightning.monitor import SMDDPMonitor as _MonitorForTrainer
from sdp_plugins.lightning.registry import install
from sdp_plugins.lightning.sharded import SMDDPShardedStrategy as _ShardedForTrainer
from sdp_plugins.lightning.strategy import SMDDPStrategy as _ForTrainer


class SMDDPStrategy(_ForTrainer, strategies.DDPStrategy):
    """DistributedDataParallel over smddp, for `lightning.pytorch`."""

    _elastic_environment = TorchElasticEnvironment


class SMDDPShardedStrategy(_ShardedForTrainer, strategies.DDPStrategy):
    """One copy of the weights per node, for `lightning.pytorch`."""

    _elastic_environment = TorchElasticEnvironment


class SMDDPLocalStrategy(_LocalForTrainer, strategies.DDPStrategy):
    """Local updates between nodes, for `lightning.pytorch`."""

    _elastic_environment = TorchElasticEnvironment


class SMDDPElasticStrategy(_ElasticForTrainer, strategies.DDPStrategy):
    """Ranks that may be lost, and others that join, for `lightning.pytorch`."""

    _elastic_environment = TorchElasticEnvironment


class SMDDPMonitor(_MonitorForTrainer, callbacks.Callback):
    """Logs this rank's communication, for `lightning.pytorch`."""


install(strategies, SMDDPStrategy, SMDDPShardedStrategy, SMDDPElasticStrategy, SMDDPLocalStrategy)
