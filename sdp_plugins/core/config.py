"""Settings of the package, read from the environment in one place.

Nothing else in ``core`` reads ``os.environ``: the launchers' variables come through
``environment``. An empty variable counts as unset. docs/configuration.md describes every variable.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .environment import environment
from .wire_dtype import WireDType

MIB = 2**20
DEFAULT_TIMEOUT_S = 300.0
_PIECE_NBYTES = 256 * 1024
_STAGING_SLOTS = 3
_MOST_STAGING_NBYTES = 24 * MIB
MAX_TIMEOUT_S = 1e8
"""Longest time-out, about three years: deadlines in nanoseconds must not overflow."""
FUSION_ALIGN = 128
"""Size of a fusion buffer is a multiple of this many bytes."""
PAGE = 4096
ERROR_FILE = "SDP_ERROR_FILE"
JOIN = "SDP_JOIN"
ROSTER_FILE = "SDP_ROSTERS"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_SAGEMAKER_FLAG = "sagemaker_distributed_dataparallel_enabled"


# ---- what the text of a variable means -----------------------------------------------------------


def _refuse(name: str, text: str, allowed: str) -> ValueError:
    return ValueError(f"{name}={text!r} cannot be used. Hint: {allowed}.")


def _seconds(name: str, text: str) -> float:
    allowed = f"seconds, above 0 and at most {MAX_TIMEOUT_S:g}, such as 300"
    value = _number(name, text, allowed)
    if not 0 < value <= MAX_TIMEOUT_S:  # false for nan too
        raise _refuse(name, text, allowed)
    return value


def _fusion_bytes(name: str, text: str) -> int:
    allowed = "a size in MiB, from 0.001 to 65536, such as 25"
    value = _number(name, text, allowed)
    if not 0.001 <= value <= 65536:
        raise _refuse(name, text, allowed)
    return int(value * MIB) // FUSION_ALIGN * FUSION_ALIGN


def _staging_bytes(name: str, text: str) -> int:
    value = _integer(name, text, 64 * 1024, 2**40, "bytes")
    return -(-value // PAGE) * PAGE


def _spin_us(name: str, text: str) -> int | None:
    if text.lower() == "auto":
        return None
    return _integer(name, text, 0, 10**6, "microseconds")


def _engine_threads(name: str, text: str) -> int:
    return _integer(name, text, 1, 64, "threads")


def _internode(name: str, text: str) -> str | None:
    word = text.lower()
    if word not in ("auto", "mpi", "gloo"):
        raise _refuse(name, text, "auto, mpi or gloo")
    return None if word == "auto" else word


def _wire_dtype(name: str, text: str) -> str:
    try:
        return str(WireDType.parse(text) or "none")
    except ValueError:
        allowed = (
            "none, bf16, fp16, int8, fp8 or int4, the last three also with stochastic or feedback"
        )
        raise _refuse(name, text, allowed) from None


def _text(name: str, text: str) -> str:
    return text


def _words(name: str, text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def _switch(name: str, text: str) -> bool:
    word = text.lower()
    if word not in _TRUE | _FALSE:
        raise _refuse(name, text, "1, true, yes or on; 0, false, no or off")
    return word in _TRUE


def _number(name: str, text: str, allowed: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _refuse(name, text, allowed) from None


def _integer(name: str, text: str, low: int, high: int, unit: str) -> int:
    allowed = f"a whole number of {unit} from {low} to {high}"
    try:
        value = int(text)
    except ValueError:
        raise _refuse(name, text, allowed) from None
    if not low <= value <= high:
        raise _refuse(name, text, allowed)
    return value


def _setting(variable: str, parse: Callable[[str, str], object], default: Any = None) -> Any:
    return field(default=default, metadata={"variable": variable, "parse": parse})


@dataclass(frozen=True)
class Config:
    """Settings of one process; the defaults are those of an empty environment."""

    timeout_s: float | None = _setting("SDP_TIMEOUT_S", _seconds)
    """Time-out of every wait of a group, in seconds; None: the framework's, else 300."""
    fusion_bytes: int = _setting("SDP_FUSION_MB", _fusion_bytes, 25 * MIB)
    """Size at which a fusion buffer is sent, a multiple of 128; the variable is in MiB."""
    register: bool = _setting("SDP_REGISTER", _switch, True)
    """Move buffers that return step after step into shared memory, and reduce them in place."""
    autoload: bool = _setting("SDP_AUTOLOAD", _switch, True)
    """Register with frameworks when they are imported."""
    staging_bytes: int | None = _setting("SDP_STAGING_BYTES", _staging_bytes)
    """Shared memory of each rank for other buffers, a multiple of 4096; None: by the ranks."""
    spin_us: int | None = _setting("SDP_SPIN_US", _spin_us)
    """Microseconds to poll before a wait sleeps; None: by the number of ranks per core."""
    engine_threads: int = _setting("SDP_ENGINE_THREADS", _engine_threads, 1)
    """Threads of each rank that share the work of a large operation."""
    device_flags: bool = _setting("SDP_DEVICE_FLAGS", _switch, True)
    """Order an accelerator's copies and the CPU by flags in memory, where the device can."""
    internode: str | None = _setting("SDP_INTERNODE", _internode)
    """``"mpi"`` or ``"gloo"``: the network between nodes; None: MPI if mpirun started the ranks."""
    wire_dtype: str = _setting("SDP_WIRE_DTYPE", _wire_dtype, "none")
    """How float32 sums travel between nodes; ``"none"``: unchanged."""
    numa: bool = _setting("SDP_NUMA", _switch, True)
    """Have ``sdp run`` bind each rank to NUMA nodes, where a machine has several."""
    native_ops: bool = _setting("SDP_NATIVE_OPS", _switch, True)
    """Compile operations for TensorFlow and JAX at their first use."""
    cache: str | None = _setting("SDP_CACHE", _text)
    """Folder for compiled operations; None: ``~/.cache/sdp_plugins``."""
    huggingface: bool = _setting("SDP_HUGGINGFACE", _switch, True)
    """Patch HuggingFace's libraries for smddp on CPUs."""
    trace: str | None = _setting("SDP_TRACE", _text)
    """Folder for a timeline of each rank's operations; None: nothing is recorded."""
    join: tuple[str, ...] | None = _setting(JOIN, _words)
    """Handles of ranks of an elastic job, which this process is to join."""
    roster_file: str | None = _setting(ROSTER_FILE, _text)
    """File of ``sdp run --elastic``, for the rosters of an elastic job."""
    flight_dir: str | None = _setting("SDP_FLIGHT_DIR", _text)
    """Folder for a report of each rank whose group fails; None: none is written."""

    @property
    def wait_s(self) -> float:
        """Time-out if neither the caller nor a framework sets one, in seconds."""
        return DEFAULT_TIMEOUT_S if self.timeout_s is None else self.timeout_s

    def staging_nbytes(self, world_size: int) -> int:
        """Size of the staging area of each rank of a group.

        A piece of 256 KiB per rank in each of the three slots fits a core's second-level cache:
        with two ranks, pieces twice as large are 15 % slower, and half as large no faster. The
        total is at most one bucket of DDP.
        """
        if self.staging_bytes is not None:
            return self.staging_bytes
        return min(_STAGING_SLOTS * _PIECE_NBYTES * world_size, _MOST_STAGING_NBYTES)

    def on_the_wire(self, dtype: object) -> Config:
        """Return these settings with another ``wire_dtype``; None leaves them as they are.

        Raises:
            ValueError: The type cannot be used between nodes.
        """
        if dtype is None:
            return self
        word = getattr(dtype, "value", str(dtype))
        return replace(self, wire_dtype=_wire_dtype("wire_dtype", word))

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Config:
        """Read the settings; warn of variables whose names are nearly right.

        Args:
            env: Variables to read; None reads the environment of this process.

        Raises:
            ValueError: A variable has a value that cannot be used; the text names both and
                says what is allowed.
        """
        given = environment() if env is None else env
        _warn_of_unused(given)
        found = {
            setting.name: setting.metadata["parse"](setting.metadata["variable"], text)
            for setting in fields(cls)
            if (text := given.get(setting.metadata["variable"], "").strip())
        }
        return cls(**found)


VARIABLES = (*(setting.metadata["variable"] for setting in fields(Config)), "SDP_JOB_ID")
"""Every variable that a user may set; ``topology`` reads the last one with the launchers'."""


# ---- single settings, read where a whole `Config` must not fail ----------------------------------


def check_bucket_mb(size: float) -> None:
    """Check a bucket size of SMDDP's API, in MiB.

    Raises:
        ValueError: It is not positive, or not a multiple of ``FUSION_ALIGN`` bytes.
    """
    if size <= 0 or size * MIB % FUSION_ALIGN:
        raise ValueError(
            f"bucket_cap_mb={size}: must be positive, and a multiple of {FUSION_ALIGN} bytes"
        )


def set_fusion_bytes(nbytes: int) -> None:
    """Set ``SDP_FUSION_MB`` for this process, and those that it starts.

    Raises:
        ValueError: It is not a positive multiple of ``FUSION_ALIGN``, or more than 64 GiB.
    """
    if nbytes <= 0 or nbytes % FUSION_ALIGN or _fusion_bytes("size", str(nbytes / MIB)) != nbytes:
        raise ValueError(
            f"a fusion buffer cannot have {nbytes} bytes. Hint: pass a multiple of {FUSION_ALIGN}, "
            "from 1152 to 64 GiB."
        )
    os.environ["SDP_FUSION_MB"] = str(nbytes / MIB)


def autoload(env: Mapping[str, str] | None = None) -> bool:
    """Read ``SDP_AUTOLOAD`` only, and never fail.

    An invalid value counts as on: ``Config.from_env`` then reports it when a group is made, which a
    missing backend could not.
    """
    return _is_on("SDP_AUTOLOAD", env)


def binds_ranks(env: Mapping[str, str]) -> bool:
    """Read ``SDP_NUMA`` only, and never fail; an invalid value counts as on."""
    return _is_on("SDP_NUMA", env)


def registers(env: Mapping[str, str] | None = None) -> bool:
    """Read ``SDP_REGISTER`` only, and never fail; an invalid value counts as on."""
    return _is_on("SDP_REGISTER", env)


def patches_huggingface(env: Mapping[str, str] | None = None) -> bool:
    """Read ``SDP_HUGGINGFACE`` only, and never fail; an invalid value counts as on."""
    return _is_on("SDP_HUGGINGFACE", env)


def sagemaker_wants_smddp(env: Mapping[str, str] | None = None) -> bool:
    """Whether SageMaker's toolkit says that the job was started with SMDDP.

    Args:
        env: Variables to read; None reads the environment of this process.
    """
    given = environment() if env is None else env
    return bool(_sagemaker_params(given).get(_SAGEMAKER_FLAG))


def take_sagemaker_flag() -> None:
    """Remove what `sagemaker_wants_smddp` reads from the environment."""
    params = _sagemaker_params(os.environ)
    if params.pop(_SAGEMAKER_FLAG, None) is not None:
        os.environ["SM_FRAMEWORK_PARAMS"] = json.dumps(params)


def _sagemaker_params(given: Mapping[str, str]) -> dict[str, Any]:
    try:
        params = json.loads(given.get("SM_FRAMEWORK_PARAMS", "") or "{}")
    except ValueError:
        return {}
    return params if isinstance(params, dict) else {}


def started_by_smddprun() -> bool:
    """Whether this is a rank that `smddprun` has started or prepared."""
    return "SMDATAPARALLEL_WORLD_SIZE" in os.environ


def take_error_file() -> str:
    """Remove ``SDP_ERROR_FILE`` from the environment; returns its value, empty if it is not set."""
    return os.environ.pop(ERROR_FILE, "")


def started_by_us() -> bool:
    """Whether this is a rank of `sdp run` or `smddprun`."""
    return "SDP_JOB_ID" in os.environ or started_by_smddprun()


@contextmanager
def defaults(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a library that reads the environment, unless they are set."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _is_on(name: str, env: Mapping[str, str] | None = None) -> bool:
    given = environment() if env is None else env
    return given.get(name, "").strip().lower() not in _FALSE


DEPRECATED = {"SDP_CALIBRATION": "every network is planned for with the same costs"}
"""Variables that have lost their meaning in this release, and why."""


def _warn_of_unused(env: Mapping[str, str]) -> None:
    """Warn of variables that have no effect.

    Rank 0 warns for its job, because a launcher gives all ranks the same variables.
    """
    found: list[tuple[str, type[Warning]]] = [
        (f"{name} has no effect any more: {why}.", FutureWarning)
        for name, why in DEPRECATED.items()
        if env.get(name)
    ]
    for name in env:
        if name.startswith("SDP_") and name not in VARIABLES:
            import difflib

            if meant := difflib.get_close_matches(name, VARIABLES, 1, cutoff=0.8):
                text = f"sdp_plugins has no variable {name}. Hint: did you mean {meant[0]}?"
                found.append((text, UserWarning))
    if found:
        from .topology import place_in_job

        place = place_in_job(env)
        for text, category in found if place is None or place.rank == 0 else ():
            warnings.warn(text, category, stacklevel=1)
