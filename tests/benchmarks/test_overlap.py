"""What `python -m benchmarks.overlap` reads from traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.overlap import main, overlap, united
from tests.trace.test_merge import collective, write


def test_overlap_is_what_ran_before_the_last_gradients_were_ready(tmp_path: Path) -> None:
    step = {"name": "step", "cat": "span", "ph": "X", "ts": 0, "dur": 1000, "tid": 9, "args": {}}
    buckets = [
        collective(1, 100, 200, waiting_us=50.0),  # beside
        collective(2, 300, 500, queued_us=100.0),  # half of it
        collective(3, 500, 600, queued_us=100.0),  # the last one, issued at 400
        collective(4, 700, 710, bytes=8),  # a loss
    ]
    write(tmp_path, 0, [step, *buckets], world_size=1)
    ((rank, found),) = overlap(tmp_path).items()
    assert (rank, found.steps, found.step, found.running) == (0, 1, 1000, 400)
    assert found.beside == pytest.approx(200 / 400)
    assert found.moving == 400 - 50
    assert found.moving_beside == pytest.approx(150 / 350)


def test_steps_are_each_rank_s_own(tmp_path: Path) -> None:
    step = {"name": "step", "cat": "span", "ph": "X", "ts": 0, "tid": 9, "args": {}}
    for rank, dur in enumerate((1000, 3000)):
        write(tmp_path, rank, [{**step, "dur": dur}, collective(1, 100, 200 + dur / 10)])
    found = overlap(tmp_path)
    assert {rank: one.step for rank, one in found.items()} == {0: 1000, 1: 3000}
    assert {rank: one.running for rank, one in found.items()} == {0: 200, 1: 400}


def test_united() -> None:
    assert united([(5, 6), (0, 2), (1, 3), (2, 2.5), (9, 8)]) == 4


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = {"name": "step", "cat": "span", "ph": "X", "ts": 0, "dur": 1e6, "tid": 9, "args": {}}
    write(tmp_path, 0, [step, collective(1, 100, 200)], world_size=1)
    main(str(tmp_path))
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["0", "1", "1000.0"]
