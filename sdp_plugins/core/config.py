"""Settings of the package, read from the environment in one place.

Nothing else in ``core`` reads ``os.environ``: the launchers' variables come through
``environment``. An empty variable counts as unset.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from .environment import environment

MIB = 2**20
DEFAULT_TIMEOUT_S = 300.0
MAX_TIMEOUT_S = 1e8
"""Longest time-out, about three years: deadlines in nanoseconds must not overflow."""
FUSION_ALIGN = 128
"""Size of a fusion buffer is a multiple of this many bytes."""
PAGE = 4096

_NAMES = (
    "SDP_TIMEOUT_S",
    "SDP_FUSION_MB",
    "SDP_REGISTER",
    "SDP_AUTOLOAD",
    "SDP_STAGING_BYTES",
    "SDP_SPIN_US",
    "SDP_JOB_ID",
    "SDP_INTERNODE",
    "SDP_WIRE_DTYPE",
    "SDP_CALIBRATION",
    "SDP_NATIVE_OPS",
    "SDP_CACHE",
    "SDP_HUGGINGFACE",
    "SDP_TRACE",
    "SDP_FLIGHT_DIR",
)
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16"}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Config:
    """Settings of one process; defaults are what an empty environment gives.

    Attributes:
        timeout_s: Time-out of every wait of a group, in seconds (``SDP_TIMEOUT_S``); None leaves
            it to the framework, or else to ``DEFAULT_TIMEOUT_S``.
        fusion_bytes: Threshold at which a fusion buffer is sealed, a multiple of 128
            (``SDP_FUSION_MB``, in MiB, fractions allowed).
        register: Move buffers that come back step after step into shared memory, so that
            peers reduce them in place (``SDP_REGISTER``).
        autoload: Register with frameworks when they are imported (``SDP_AUTOLOAD``).
        staging_bytes: Shared memory per rank for buffers that are not registered, a multiple
            of 4096; None chooses by the number of ranks (``SDP_STAGING_BYTES``).
        spin_us: Microseconds to poll before sleeping in a wait; None chooses by the number of
            ranks per allowed core (``SDP_SPIN_US``).
        internode: ``"mpi"`` or ``"gloo"``: the network between nodes; None takes MPI if mpirun has
            started the ranks (``SDP_INTERNODE``).
        wire_dtype: ``"bfloat16"`` or ``"float16"``: how float32 values travel between nodes when
            they are reduced; None leaves them as they are (``SDP_WIRE_DTYPE``).
        calibration: File with measured costs of the network between nodes, written by rank 0 if it
            is not there; None measures once per process (``SDP_CALIBRATION``).
        native_ops: Compile operations for TensorFlow and JAX at their first use
            (``SDP_NATIVE_OPS``).
        cache: Folder for what was compiled; None: ``~/.cache/sdp_plugins`` (``SDP_CACHE``).
        huggingface: Mend HuggingFace's libraries for smddp on CPUs (``SDP_HUGGINGFACE``).
        trace: Folder for a timeline of each rank's operations; None: none is recorded
            (``SDP_TRACE``).
        flight_dir: Folder for a report of each rank whose group fails; None: none is left
            (``SDP_FLIGHT_DIR``).
    """

    timeout_s: float | None = None
    fusion_bytes: int = 25 * MIB
    register: bool = True
    autoload: bool = True
    staging_bytes: int | None = None
    spin_us: int | None = None
    internode: str | None = None
    wire_dtype: str | None = None
    calibration: str | None = None
    native_ops: bool = True
    cache: str | None = None
    huggingface: bool = True
    trace: str | None = None
    flight_dir: str | None = None

    @property
    def wait_s(self) -> float:
        """Time-out where neither the caller nor a framework gives one, in seconds."""
        return DEFAULT_TIMEOUT_S if self.timeout_s is None else self.timeout_s

    def on_the_wire(self, dtype: object) -> Config:
        """With another ``wire_dtype``; None leaves it.

        Raises:
            ValueError: It is none that can be used.
        """
        if dtype is None:
            return self
        return replace(
            self, wire_dtype=_wire_dtype("wire_dtype", getattr(dtype, "value", str(dtype)))
        )

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
        _warn_of_misspelt(given)

        def read(name: str, parse: Callable[[str, str], _T], default: _T) -> _T:
            text = given.get(name, "").strip()
            return parse(name, text) if text else default

        return cls(
            timeout_s=read("SDP_TIMEOUT_S", _seconds, cls.timeout_s),
            fusion_bytes=read("SDP_FUSION_MB", _fusion_bytes, cls.fusion_bytes),
            register=read("SDP_REGISTER", _switch, cls.register),
            autoload=read("SDP_AUTOLOAD", _switch, cls.autoload),
            staging_bytes=read("SDP_STAGING_BYTES", _staging_bytes, cls.staging_bytes),
            spin_us=read("SDP_SPIN_US", _spin_us, cls.spin_us),
            internode=read("SDP_INTERNODE", _internode, cls.internode),
            wire_dtype=read("SDP_WIRE_DTYPE", _wire_dtype, cls.wire_dtype),
            calibration=read("SDP_CALIBRATION", _path, cls.calibration),
            native_ops=read("SDP_NATIVE_OPS", _switch, cls.native_ops),
            cache=read("SDP_CACHE", _path, cls.cache),
            huggingface=read("SDP_HUGGINGFACE", _switch, cls.huggingface),
            trace=read("SDP_TRACE", _path, cls.trace),
            flight_dir=read("SDP_FLIGHT_DIR", _path, cls.flight_dir),
        )


def check_bucket_mb(size: float) -> None:
    """See that a size that SMDDP's API is given for its buckets, in MiB, is one.

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
            f"{nbytes} bytes are no size of a fusion buffer. Hint: a multiple of {FUSION_ALIGN}, "
            "from 1152 to 64 GiB."
        )
    os.environ["SDP_FUSION_MB"] = str(nbytes / MIB)


def autoload(env: Mapping[str, str] | None = None) -> bool:
    """Look at ``SDP_AUTOLOAD`` alone, and never fail.

    A value that cannot be read counts as on: whoever makes a group then hears of it from
    ``Config.from_env``, while a backend that is not there would tell nothing.

    Args:
        env: Variables to read; None reads the environment of this process.
    """
    return _is_on("SDP_AUTOLOAD", env)


def mends_huggingface(env: Mapping[str, str] | None = None) -> bool:
    """Look at ``SDP_HUGGINGFACE`` alone, as `autoload` does at its variable."""
    return _is_on("SDP_HUGGINGFACE", env)


def sagemaker_wants_smddp(env: Mapping[str, str] | None = None) -> bool:
    """Whether SageMaker's toolkit says that the job was started with SMDDP.

    Args:
        env: Variables to read; None reads the environment of this process.
    """
    given = environment() if env is None else env
    try:
        params = json.loads(given.get("SM_FRAMEWORK_PARAMS", "") or "{}")
    except ValueError:
        return False
    flag = "sagemaker_distributed_dataparallel_enabled"
    return isinstance(params, dict) and bool(params.get(flag))


def started_by_smddprun() -> bool:
    """Whether this is a rank that `smddprun` has started or prepared."""
    return "SMDATAPARALLEL_WORLD_SIZE" in os.environ


def started_by_us() -> bool:
    """Whether this is a rank of `sdp run` or `smddprun`."""
    return "SDP_JOB_ID" in os.environ or started_by_smddprun()


@contextmanager
def defaults(variables: Mapping[str, str]) -> Iterator[None]:
    """Have a library that reads the environment find these variables where they are not set."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _is_on(name: str, env: Mapping[str, str] | None) -> bool:
    given = environment() if env is None else env
    return given.get(name, "").strip().lower() not in _FALSE


def _warn_of_misspelt(env: Mapping[str, str]) -> None:
    for name in env:
        if name.startswith("SDP_") and name not in _NAMES:
            import difflib

            if meant := difflib.get_close_matches(name, _NAMES, 1, cutoff=0.8):
                text = f"{name} means nothing to sdp_plugins. Hint: did you mean {meant[0]}?"
                warnings.warn(text, stacklevel=1)


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


def _internode(name: str, text: str) -> str | None:
    word = text.lower()
    if word not in ("auto", "mpi", "gloo"):
        raise _refuse(name, text, "auto, mpi or gloo")
    return None if word == "auto" else word


def _wire_dtype(name: str, text: str) -> str | None:
    word = _SHORT_NAMES.get(text.lower(), text.lower())
    if word not in ("none", "float32", "bfloat16", "float16"):
        raise _refuse(name, text, "bf16, fp16 or none")
    return None if word in ("none", "float32") else word


def _path(name: str, text: str) -> str:
    return text


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
