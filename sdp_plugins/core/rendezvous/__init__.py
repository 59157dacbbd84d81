"""How the ranks of a job find each other and connect; needs nothing but the standard library.

An ``Exchange`` all-gathers a small blob per rank: ``EnvHub`` from the environment alone,
``StoreExchange`` through a framework's store, or a parent group. With one they ``meet``;
then the ranks of each node connect pairwise by Unix sockets, over which they hand each other their
shared-memory segments.
"""

from .announcement import ANNOUNCEMENT_NBYTES
from .connect import Meeting, connect, meet
from .env_hub import EnvHub
from .exchange import Exchange, StoreExchange
from .links import Links

__all__ = [
    "ANNOUNCEMENT_NBYTES",
    "EnvHub",
    "Exchange",
    "Links",
    "Meeting",
    "StoreExchange",
    "connect",
    "meet",
]
