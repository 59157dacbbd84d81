"""The errors of a running job.

SageMaker's toolkit searches the ranks' tracebacks for every name in this module, to report the
error in the job's failure file. This module must therefore define no other names.
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
