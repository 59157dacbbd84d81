"""How the ranks of a job find each other and connect; needs nothing but the standard library.

An ``Exchange`` all-gathers a small blob per rank: ``EnvExchange`` from the environment alone,
``StoreExchange`` through a framework's store, or a parent group. With one they ``meet``;
then the ranks of each node connect pairwise by Unix sockets, over which they hand each other their
shared-memory segments.
"""

from .announcement import ANNOUNCEMENT_NBYTES
from .connect import Rendezvous, meet
from .env_exchange import EnvExchange
from .mesh_connector import Links
from .store_exchange import Exchange, StoreExchange

__all__ = [
    "ANNOUNCEMENT_NBYTES",
    "EnvExchange",
    "Exchange",
    "Links",
    "Rendezvous",
    "StoreExchange",
    "meet",
]
