"""The strategies over smddp: mixins for the DDPStrategy of any Lightning package."""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from sdp_plugins.core.errors import is_news
from sdp_plugins.lightning.cluster_environment import for_this_launch
from sdp_plugins.lightning.launcher import watched
from sdp_plugins.lightning.namespaces import FABRIC, TRAINER, LightningClass, concrete_class
from sdp_plugins.lightning.parent_watch import ParentWatch
from sdp_plugins.torch.backend_name import BACKEND
from sdp_plugins.torch.group_options import Options, default_options

if TYPE_CHECKING:
    from sdp_plugins.torch.direct_gradients import DirectGradients

log = logging.getLogger(__name__)


class _OfPackage(LightningClass):
    """Chooses the class for the Lightning package in use, as pathlib.Path does.

    Not a part of `_OverSmddp`: LightningCLI reads the arguments of `__init__` only where no
    `__new__` is.
    """

    _packages: tuple[str, ...] = ()  # of a mixin
    _concrete = "SMDDPStrategy"  # the name of the classes for them

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of a concrete class."""
        if "_packages" in vars(cls):
            cls = concrete_class(cls._packages, cls._concrete)
        elif not hasattr(cls, "barrier"):
            raise TypeError(
                f"{cls.__name__} has no Lightning strategy among its bases. Hint: subclass the "
                "SMDDPStrategy of one Lightning package, such as sdp_plugins.lightning.pytorch."
            )
        return super().__new__(cls)


class _OverSmddp(_OfPackage):
    """A mixin for DDPStrategy, shared by Trainer and Fabric.

    Args:
        *args: Of Lightning's DDPStrategy.
        wire_dtype: How float32 values travel between nodes, such as ``"bf16"`` or ``"int8"``; None:
            ``SDP_WIRE_DTYPE``.
        **kwargs: Of Lightning's DDPStrategy.
    """

    _ddp_kwargs: dict[str, Any]
    _direct: DirectGradients | None = None
    _launcher: Any
    root_device: Any
    _cluster_environment: Any = None
    _elastic_environment: type  # of a concrete class

    def __init__(self, *args: Any, wire_dtype: str | None = None, **kwargs: Any) -> None:
        self._options = Options(wire_dtype)
        super().__init__(*args, **kwargs)

    @property
    def _process_group_backend(self) -> str:
        """Always smddp; DDPStrategy assigns it in `__init__` and reads it later."""
        return BACKEND

    @_process_group_backend.setter
    def _process_group_backend(self, backend: str | None) -> None:
        if backend not in (None, BACKEND):
            raise ValueError(
                f"{type(self).__name__} always uses process_group_backend={BACKEND!r}, got "
                f"{backend!r}. Hint: for another backend use Lightning's DDPStrategy."
            )

    @property
    def cluster_environment(self) -> Any:
        """The launcher of this job; see `cluster_environment`."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        self._cluster_environment = for_this_launch(environment, self._elastic_environment)

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
        if interactive and self._launcher and not self._launcher.is_interactive_compatible:
            raise RuntimeError(  # Lightning's own error recommends names of ddp
                "This strategy cannot start its workers from a notebook or an interactive session. "
                "Hint: choose strategy='smddp_notebook', or run the code as a script."
            )
        self._launcher = watched(self._launcher)

    def setup_environment(self) -> None:
        """Make the process group; end this rank if its launching process has ended meanwhile."""
        import sdp_plugins.torch  # noqa: F401  (registers the backend if autoload is off)

        chosen = default_options.set(self._options)
        try:
            with ParentWatch():
                super().setup_environment()
        finally:
            default_options.reset(chosen)

    def _choose_views(self) -> None:
        """Have gradients be views of buckets, unless the user refuses."""
        if self.root_device.type == "cpu":
            self._ddp_kwargs.setdefault("gradient_as_bucket_view", True)

    def _write_into_buckets(self, wrapped: Any) -> None:
        """Have layers write gradients there."""
        if self.root_device.type == "cpu" and self._ddp_kwargs["gradient_as_bucket_view"]:
            from sdp_plugins.torch import write_into_buckets

            self._direct = write_into_buckets(wrapped)


class SMDDPStrategy(_OverSmddp):
    """DistributedDataParallel over smddp, for Lightning's Trainer.

    Takes the arguments of Lightning's DDPStrategy and of DistributedDataParallel, whose
    ``gradient_as_bucket_view`` is True by default, on CPUs. Makes an object for the Lightning
    package in use: see `sdp_plugins.lightning`.
    """

    _packages = TRAINER
    model: Any

    def configure_ddp(self) -> None:
        """Wrap the module."""
        self._choose_views()
        super().configure_ddp()
        self._write_into_buckets(self.model)

    def teardown(self) -> None:
        """Leave the module as it was."""
        if self._direct is not None:
            self._direct.leave()
        super().teardown()

    def setup(self, trainer: Any) -> None:
        """Set up the model and the handling of SIGTERM."""
        super().setup(trainer)
        terminate_between_steps(trainer)

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why this one ends, and end the ranks that this process launched."""
        super().on_exception(exception)
        name_smddp(exception)
        leave_group(exception)
        if hasattr(self._launcher, "end_children"):
            self._launcher.end_children()


class SMDDPFabricStrategy(_OverSmddp):
    """DistributedDataParallel over smddp, for Fabric; as `SMDDPStrategy`."""

    _packages = FABRIC

    def setup_module(self, module: Any) -> Any:
        """Wrap a module."""
        self._choose_views()
        wrapped = super().setup_module(module)
        self._write_into_buckets(wrapped)
        return wrapped


def terminate_between_steps(trainer: Any) -> None:
    """Make SIGTERM end the training after the current step, as preempted jobs require.

    Lightning's handler then only sets a flag. From 2.6 on, it also calls a collective, at whatever
    point the signal reaches each rank. smddp refuses that, because the ranks are in different
    operations. Without it, every rank receives the signal in the same step and checks the flag when
    the step ends.
    """
    connector = trainer._signal_connector
    if not hasattr(connector, "_sigterm_notifier_fn"):
        return

    def note(number: int, frame: FrameType | None) -> None:
        log.info("[rank %d] received %s", trainer.global_rank, signal.Signals(number).name)
        if not connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(number)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note


def name_smddp(exception: BaseException) -> None:
    """Replace ddp's strategy names in DDPStrategy's error messages by smddp's."""
    texts = {
        "'ddp_find_unused_parameters": "'smddp_find_unused_parameters",
        "strategy=DDPStrategy(": "strategy=SMDDPStrategy(",
    }
    if len(exception.args) == 1 and isinstance(exception.args[0], str):
        for theirs, ours in texts.items():
            exception.args = (exception.args[0].replace(theirs, ours),)


def leave_group(exception: BaseException) -> None:
    """Leave the process group, so that waiting ranks end now with the cause.

    Afterwards there is no group: the teardown does not wait, and another fit() makes a new group.
    """
    from sdp_plugins.torch.groups import smddp_group

    if not dist.is_initialized() or (group := smddp_group()) is None:
        return
    if reason := why_others_fail(exception):
        group.abort(reason)
    dist.destroy_process_group()


def why_others_fail(exception: BaseException) -> str | BaseException | None:
    """The reason for the other ranks' errors; None if the exception is no failure of this rank.

    SIGTERMException is an orderly exit if all ranks received the signal. If only this rank did, the
    others are still training and need the reason.
    """
    if any(cls.__name__ == "SIGTERMException" for cls in type(exception).__mro__):
        return "it received SIGTERM"
    return exception if is_news(exception) else None
