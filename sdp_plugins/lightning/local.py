"""The strategy of local updates: a mixin as in `strategy`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch.distributed as dist
from fsspec.core import url_to_fs

from sdp_plugins.core.local_updates.outer_step import OuterStep
from sdp_plugins.core.local_updates.schedule import Schedule
from sdp_plugins.core.local_updates.wire import parse_wire
from sdp_plugins.lightning.namespaces import TRAINER
from sdp_plugins.lightning.strategy import SMDDPStrategy

if TYPE_CHECKING:
    from sdp_plugins.torch import LocalUpdates

log = logging.getLogger(__name__)
_STATE = "sdp_local_updates"


class SMDDPLocalStrategy(SMDDPStrategy):
    """`LocalUpdates` between nodes, DistributedDataParallel inside them, for Lightning's Trainer.

    Makes an object for the Lightning package in use: see `sdp_plugins.lightning`.

    Args:
        *args: Of Lightning's DDPStrategy.
        every: Steps from one outer step to the next one.
        outer: ``"average"``, ``"nesterov"`` or an `OuterStep`.
        wire: How values travel between nodes; None: exactly.
        fragments: Number of parts of the model that take their outer steps in turn.
        delay: Steps that a rank goes on while its parameters travel.
        inner_ranks: Ranks that average gradients in every step; None: those of a node.
        **kwargs: Of Lightning's DDPStrategy.
    """

    _packages = TRAINER
    _concrete = "SMDDPLocalStrategy"
    _ddp_kwargs: dict[str, Any]
    model: Any
    optimizers: Any
    precision_plugin: Any
    is_global_zero: bool
    global_rank: int
    world_size: int
    broadcast: Any
    checkpoint_io: Any
    load_model_state_dict: Any
    lightning_module: Any

    def __init__(
        self,
        *args: Any,
        every: int = 30,
        outer: OuterStep | str = "average",
        wire: str | None = None,
        fragments: int = 1,
        delay: int = 0,
        inner_ranks: int | None = None,
        **kwargs: Any,
    ) -> None:
        if "process_group" in kwargs:
            raise ValueError(
                "smddp_local makes the group inside which gradients are averaged. Hint: say its "
                "size by inner_ranks=, in place of process_group=."
            )
        if kwargs.get("wire_dtype") is not None:
            raise ValueError(
                "smddp_local averages gradients inside nodes only, where nothing is rounded. Hint: "
                f"wire={kwargs['wire_dtype']!r} rounds what travels between nodes."
            )
        if inner_ranks is not None and not (isinstance(inner_ranks, int) and inner_ranks >= 1):
            raise ValueError(f"inner_ranks={inner_ranks}: it must be an integer, at least 1.")
        Schedule(every, fragments, delay)
        OuterStep.parse(outer)
        parse_wire(wire)
        super().__init__(*args, **kwargs)
        self._inner_ranks = inner_ranks
        self._form: dict[str, Any] = {"every": every, "outer": outer, "wire": wire}
        self._form |= {"fragments": fragments, "delay": delay}
        self._local: LocalUpdates | None = None

    def configure_ddp(self) -> None:
        """Wrap the module, to average gradients inside a node."""
        self._ddp_kwargs["process_group"] = self._inner_group()
        super().configure_ddp()

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizer, whose steps count."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ValueError(
                "smddp_local counts the steps of one optimizer, but configure_optimizers() "
                f"returns {len(self.optimizers)}. Hint: strategy='smddp'."
            )
        inner = dist.get_world_size(self._ddp_kwargs["process_group"])
        if inner == dist.get_world_size() > 1:
            chosen = self._inner_ranks and f"inner_ranks={self._inner_ranks} are all ranks"
            log.warning(
                "smddp_local: %s, so their gradients are averaged in every step, as by smddp. "
                "Hint: inner_ranks=1 makes each rank train by itself.",
                chosen or "all ranks are on one node",
            )
            return
        from sdp_plugins.torch import LocalUpdates

        self._local = LocalUpdates(self.model, self.optimizers[0], **self._form)

    def on_train_end(self) -> None:
        """Make the ranks' parameters equal."""
        super().on_train_end()
        if self._local is not None:
            self._local.synchronize()

    def teardown(self) -> None:
        """Exchange nothing any more."""
        if self._local is not None:
            self._local.close()
            self._local = None
        inner = self._ddp_kwargs.pop("process_group", None)
        super().teardown()
        if inner is not None and dist.is_initialized():
            dist.destroy_process_group(inner)

    # ---- checkpoints: a file for each rank, as optimizers differ, and parameters for the most part

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save this rank's state; rank 0's file has the name that was asked for."""
        if self._local is None or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        # The name may have metrics, of which each rank has its own.
        filepath, save = self.broadcast((filepath, uuid4().hex))
        checkpoint[_STATE] = {**self._local.state_dict(), "save": save}
        path = _path(filepath, self.global_rank)
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove all ranks' files, by rank 0's choice: others may have other metrics."""
        if self.is_global_zero:
            for rank in range(self.world_size):
                self.checkpoint_io.remove_checkpoint(_path(filepath, rank))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load this rank's file; that of rank 0 if there is none, as of another strategy."""
        if os.path.islink(checkpoint_path):  # Lightning links last.ckpt to rank 0's file
            checkpoint_path = os.path.realpath(checkpoint_path)
        path = _path(checkpoint_path, self.global_rank)
        files, name = url_to_fs(str(path))
        if not files.exists(name):
            path = checkpoint_path
        checkpoint = super().load_checkpoint(path, *args, **kwargs)
        saves = _of_all((checkpoint.get(_STATE) or {}).get("save"))
        if any(save != saves[0] for save in saves):  # rank 0's file was written by itself
            checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from this rank's parameters, as far as they are of such ranks."""
        super().load_optimizer_state_dict(checkpoint)
        if self._local is None:
            return
        state = checkpoint.get(_STATE) or {"rank": None, "world_size": None}
        is_mine = (state["rank"], state["world_size"]) == (dist.get_rank(), dist.get_world_size())
        told = _of_all(is_mine)
        if not all(told):
            log.warning(
                "smddp_local: the checkpoint has no state of rank %s in a job of %d: all begin "
                "new outer steps, from rank 0's parameters.",
                ", ".join(str(rank) for rank, has_state in enumerate(told) if not has_state),
                len(told),
            )
            return
        # `LocalUpdates` has given all ranks rank 0's parameters.
        self.load_model_state_dict(checkpoint, strict=self.lightning_module.strict_loading)
        self._local.load_state_dict(state)

    def _inner_group(self) -> Any:
        from sdp_plugins.torch.groups import core_group

        world = core_group()
        assert world is not None
        nodes = [list(ranks) for ranks in world.nodes.members]
        if self._inner_ranks is not None and world.world_size > 1:
            if world.world_size % self._inner_ranks:
                raise ValueError(
                    f"inner_ranks={self._inner_ranks}: it must divide the number of ranks, which "
                    f"is {world.world_size}. Hint: leave it out; then it is a node's ranks."
                )
            every = range(0, world.world_size, self._inner_ranks)
            nodes = [list(range(first, first + self._inner_ranks)) for first in every]
        if len(nodes) > 1 and getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "smddp_local: the GradScaler of this precision skips steps of single ranks, but "
                "all must take the same number. Hint: precision='bf16-mixed'."
            )
        return dist.new_subgroups_by_enumeration(nodes)[0]


def _path(path: Any, rank: int) -> Any:
    return path if rank == 0 else f"{path}.rank{rank}"


def _of_all(mine: Any) -> list[Any]:
    """What each rank says; a collective."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told
