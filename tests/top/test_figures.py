"""What is seen of the ranks of real jobs."""

from __future__ import annotations

import os
import signal
import time

import pytest

from sdp_plugins.flight.rank_snapshot import RankSnapshot
from sdp_plugins.flight.wait_report import groups_of
from sdp_plugins.top.figures import GroupFigures, figures_of
from sdp_plugins.top.job_watch import JobWatch
from sdp_plugins.top.timeline import CELLS, lanes_of
from sdp_plugins.top.view import view_of
from tests.ranks import HANG_S, Start
from tests.top.cases import BYTES, going, sampling_of, seen_group, train, watch_of

NOBODY = -1


def look(watch: JobWatch, pause_s: float) -> tuple[list[RankSnapshot], GroupFigures]:
    """Two readings with a pause between them."""
    before = watch.read()
    time.sleep(pause_s)
    now = list(watch.read())
    return now, seen_group(figures_of(groups_of(before), groups_of(now)))


def test_a_slow_rank_is_the_straggler(start_pooled: Start) -> None:
    with start_pooled(3, train, 1) as ranks:
        going(ranks)
        watch = watch_of(ranks)
        now, group = look(watch, 2.0)
        assert group.straggler == 1
        slow = group.ranks[1]
        assert slow.awaited > 0.3 and slow.waiting < 0.3
        for rank in (0, 2):
            figures = group.ranks[rank]
            assert figures.waiting > 0.3 and figures.busy >= figures.waiting
            assert figures.operations == pytest.approx(slow.operations, rel=0.5)
            assert figures.steps == pytest.approx(figures.operations / 3)
            assert figures.nbytes == pytest.approx(figures.operations * BYTES)
        view = view_of(watch.job, [group])
        assert "rank 1 is the straggler" in view.groups[0].title
        assert [row.straggler for row in view.groups[0].rows] == [False, True, False]
        lanes = {lane.rank: lane for lane in lanes_of(now)}
        assert sum(lanes[0].waiting) > 2 * sum(lanes[1].waiting)


def test_a_stopped_rank_is_waited_for(start_pooled: Start) -> None:
    with start_pooled(2, train, NOBODY) as ranks:
        going(ranks)
        sampling = sampling_of(ranks, 0.2)
        ranks[1].kill(signal.SIGSTOP)
        end = time.monotonic() + HANG_S
        while "rank 1 is the straggler" not in (text := str(sampling.view())):
            assert time.monotonic() < end, text
            sampling.read()
            time.sleep(0.2)
        (row,) = (row for group in sampling.view().groups for row in group.rows if row.rank == 1)
        assert row.gone and row.cells[-1].startswith("is stopped, ")
        lanes = {lane.rank: lane for lane in lanes_of(sampling.latest())}
        assert len(lanes[0].waiting) == CELLS
        assert lanes[0].waiting[-2] + lanes[0].moving[-2] > 50  # it may be stopped in a collective
        ranks[1].kill(signal.SIGCONT)


def test_a_rank_that_was_killed_and_the_end_of_the_job(start_pooled: Start) -> None:
    with start_pooled(2, train, NOBODY) as ranks:
        going(ranks)
        sampling = sampling_of(ranks)
        sampling.read()
        assert sampling.latest() and not sampling.ended
        for rank in ranks:
            rank.kill(signal.SIGKILL)
        end = time.monotonic() + HANG_S
        while not sampling.ended:
            assert time.monotonic() < end
            sampling.read()
            time.sleep(0.02)
        assert sampling.ended == "the job has ended"


def test_one_reading_compares_with_nothing(start_pooled: Start) -> None:
    with start_pooled(2, train, NOBODY) as ranks:
        going(ranks)
        watch = watch_of(ranks)
        now = watch.read()
        for figures in seen_group(figures_of({}, groups_of(now))).ranks.values():
            assert figures[1:] == (0, None, 0, 0, 0, 0)
        assert os.getpid() not in watch.job.pids
