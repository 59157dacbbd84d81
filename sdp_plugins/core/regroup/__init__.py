"""How the ranks of a job find each other again: when some are lost, and when others join.

Every rank has a ``Listener``, whose ``Handle`` all others know. Those that are left connect to the
lowest of them (``Regrouping``), which decides who is in the next group (``Roster``) and passes
their blobs on, until they are connected (``Meeting``, an ``Exchange``). If another rank is lost
meanwhile, they begin again.
"""

from .handle import Handle
from .listener import Listener
from .meeting import Meeting
from .participant import Participant
from .regrouping import Terms
from .roster import Member, Roster
from .roster_file import RosterFile

__all__ = [
    "Handle",
    "Listener",
    "Meeting",
    "Member",
    "Participant",
    "Roster",
    "RosterFile",
    "Terms",
]
