"""Who has connected to a rank, when connections end and others begin."""

from __future__ import annotations

import select
from contextlib import closing

from sdp_plugins.core.addresses_and_ports import LOOPBACK
from sdp_plugins.core.regroup import Listener, Member, Roster
from sdp_plugins.core.regroup.connection import Connection
from sdp_plugins.core.regroup.hello import Hello
from sdp_plugins.core.regroup.visitors import Visitors
from tests.rank import HANG_S


def look_when_readable(visitors: Visitors) -> None:
    assert select.select([visitors], [], [], HANG_S)[0]
    visitors.look()


def test_what_an_older_connection_says_does_not_count() -> None:
    """It may be read later: a rank connects for each regrouping, and not all need what it says."""
    with closing(Visitors(Listener(LOOPBACK))) as visitors, closing(Listener(LOOPBACK)) as other:
        member = Member(1, other.handle)
        roster = Roster(0, (Member(0, visitors.handle), member))
        hello = Hello(member, roster).to(visitors.handle)
        with closing(Connection.to(visitors.handle)) as older:
            look_when_readable(visitors)
            assert not visitors.known
            with closing(Connection.to(visitors.handle)) as newer:
                newer.send(hello)
                look_when_readable(visitors)
                newest = visitors.known[member.handle]
                older.send(hello)
                look_when_readable(visitors)
                older.close()
                look_when_readable(visitors)
                assert visitors.known == {member.handle: newest}
        look_when_readable(visitors)
        assert not visitors.known
