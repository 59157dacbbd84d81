"""The errors of a running job.

SageMaker's toolkit takes every name in here and looks for it in the ranks' tracebacks, to say in
the job's failure file which one it was: so nothing else may be a name of this module.
"""

from sdp_plugins.core.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    RendezvousError,
    RendezvousTimeoutError,
    SdpError,
    SharedMemoryError,
)
from sdp_plugins.core.errors import CollectiveTimeoutError as SMDDPTimeoutError
from sdp_plugins.core.errors import SdpError as SMDDPError
from sdp_plugins.core.errors import SdpError as SMDDPNCCLError

__all__ = [
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "PeerLostError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "SMDDPError",
    "SMDDPNCCLError",
    "SMDDPTimeoutError",
    "SdpError",
    "SharedMemoryError",
]
