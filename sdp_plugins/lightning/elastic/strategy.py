"""The strategy `smddp_elastic`, a mixin for the DDPStrategy of any Lightning package."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.core.config import Config
from sdp_plugins.lightning.namespaces import TRAINER
from sdp_plugins.lightning.strategy import SMDDPStrategy

if TYPE_CHECKING:
    from sdp_plugins.lightning.elastic.fit import ElasticFit
    from sdp_plugins.torch.elastic.default_group import DefaultGroup

_job: list[DefaultGroup] = []


class SMDDPElasticStrategy(SMDDPStrategy):
    """DistributedDataParallel of the ranks that are there: some may be lost, and others join.

    Takes the arguments of Lightning's DDPStrategy and of DistributedDataParallel. Makes an object
    for the Lightning package in use: see `sdp_plugins.lightning`. docs/elastic.md says what is
    promised.
    """

    _packages = TRAINER
    _concrete = "SMDDPElasticStrategy"

    model: Any
    lightning_module: Any
    _timeout: timedelta | None
    _fit: ElasticFit | None = None
    loss_factor = 1.0
    _pl_static_graph_delay_done: bool

    # ---- the ranks -----------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        environment = self.cluster_environment
        if self.num_processes > 1 and not environment.creates_processes_externally:
            raise RuntimeError(
                "smddp_elastic starts no ranks itself: the first one, which started the others, "
                "could not be lost. Hint: sdp run --elastic MIN:MAX train.py"
            )

    @property
    def ranks(self) -> DefaultGroup:
        """The ranks that are there."""
        return _job[0]

    @ranks.setter
    def ranks(self, group: DefaultGroup) -> None:
        _job[:] = [group]

    @property
    def global_rank(self) -> int:
        """This rank; that of a process that joins is not known before its first batch."""
        return self.ranks.core.rank if _job else 1

    @property
    def world_size(self) -> int:
        """Number of ranks that are there."""
        return self.ranks.core.world_size if _job else 2

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which part of the data for validation this rank takes."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_distributed(self) -> None:
        """Make the process group, unless this process joins: then its fit() does so."""
        if not _job and Config.from_env().join is None:
            self.ranks = self._meet()
        self.set_world_ranks()

    def _meet(self) -> DefaultGroup:
        from sdp_plugins.torch.elastic.default_group import DefaultGroup

        if self._timeout is None or self._timeout == default_pg_timeout:
            return DefaultGroup(Config.from_env().wait_s, 1)
        return DefaultGroup(self._timeout.total_seconds(), 1)

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why this one leaves."""
        super().on_exception(exception)
        self.close()

    def close(self) -> None:
        """Leave the job: to the others, this rank has ended."""
        if _job:
            _job.pop().close()

    # ---- fit -----------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Set up the model; follow `fit`."""
        is_new = not _job
        if is_new and trainer.state.fn != "fit":
            raise RuntimeError(
                f"smddp_elastic: a process that joins a job joins in fit(), but calls "
                f"{trainer.state.fn}() before it. Hint: call that after fit()."
            )
        if is_new:
            trainer.num_sanity_val_steps = 0  # the others have done it
        super().setup(trainer)
        if trainer.state.fn == "fit":
            from sdp_plugins.lightning.elastic.fit import ElasticFit

            self._fit = ElasticFit(trainer, self, self._meet if is_new else None)

    def teardown(self) -> None:
        """Leave the Trainer's loops as they were."""
        if self._fit is not None:
            self._fit.close()
            self._fit = None
        super().teardown()

    def configure_ddp(self) -> None:
        """Wrap the module for the ranks that are there."""
        if _job:
            self._pl_static_graph_delay_done = False
            super().configure_ddp()

    def end_ddp(self) -> None:
        """Unwrap the module."""
        if isinstance(self.model, DistributedDataParallel):
            from sdp_plugins.torch.elastic.model import end_reducer

            end_reducer(self.model)
            self.model = self.lightning_module

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divide the data for training among the ranks that are there."""
        dataloader = super().process_dataloader(dataloader)
        if self._fit is not None and self._fit.is_training:
            self._fit.division.divide(dataloader)
        return dataloader

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients that count as this rank's number of samples does."""
        if self.loss_factor != 1.0:
            closure_loss = closure_loss * self.loss_factor
        return super().backward(closure_loss, *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a value that the ranks log; exactly, if it is a mean of numbers of samples."""
        if isinstance(tensor, Tensor) and reduce_op in ("mean", "avg"):
            tensor = tensor if tensor.is_floating_point() else tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step of an optimizer, and count it."""
        output = super().optimizer_step(*args, **kwargs)
        if self._fit is not None:
            self._fit.steps += 1
        return output
