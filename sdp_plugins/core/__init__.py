"""The core: groups, collectives and fusion buffers, for any framework or none.

Imports the standard library, NumPy and the native module only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    RendezvousError,
    RendezvousTimeoutError,
    SdpError,
    SharedMemoryError,
)

if TYPE_CHECKING:
    from .buffers import Buffer
    from .dtypes import DType, ReduceOp
    from .elastic_job import ElasticJob
    from .fusion import FusionBuffer
    from .group import Group
    from .work import Work

__all__ = [
    "Buffer",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DType",
    "ElasticJob",
    "FusionBuffer",
    "Group",
    "PeerLostError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "ReduceOp",
    "SdpError",
    "SharedMemoryError",
    "Work",
]

_HOMES = {
    "Buffer": "buffers",
    "DType": "dtypes",
    "ElasticJob": "elastic_job",
    "FusionBuffer": "fusion",
    "Group": "group",
    "ReduceOp": "dtypes",
    "Work": "work",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Load the native module only when it is needed: frameworks import this package at start-up."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(f".{home}", __name__), name)
    except ImportError as error:
        if "_native" not in str(error):
            raise
        raise ImportError(
            f"the native module of sdp_plugins is missing in {__path__[0]}: {error}. Hint: if this "
            "is a source checkout, install it (make venv, or pip install -e .), or start Python "
            "from another folder."
        ) from error
    globals()[name] = value
    return value
