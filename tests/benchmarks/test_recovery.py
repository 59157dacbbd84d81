"""How long a training needs to go on: figures of what ranks said, and one kill of smddp."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.recovery.said import BEGAN, COMMITTED, Said
from benchmarks.recovery.timing import Recovery, recovery, step_us

KILLED_AT = 10.0


def steps(pids, numbers, at, generation=0, world=None):
    """Steps that some ranks begin and commit, each 0.5 s long."""
    said = []
    for number in numbers:
        for pid in pids:
            said.append(Said(at, pid, BEGAN, generation, number, 0))
        at += 0.5
        for pid in pids:
            said.append(Said(at, pid, COMMITTED, generation, number, world or len(pids)))
    return said


def begun(pids, number, at):
    return [Said(at, pid, BEGAN, 0, number, 0) for pid in pids]


BEFORE = [*steps((1, 2, 3), (4, 5), 9.0 - 0.2), *begun((1, 2, 3), 6, 9.8)]


def test_others_that_go_on_have_lost_the_step_in_which_the_kill_was():
    said = [*BEFORE, *steps((1, 2), (6, 7), 10.1), *steps((1, 2, 8), (8,), 13.0)]
    assert recovery(said, 3, 3, KILLED_AT) == pytest.approx(Recovery(0.6, 1, 3.5))


def test_a_step_that_the_killed_rank_had_completed_is_not_the_next_one():
    late = [Said(10.05, pid, COMMITTED, 0, 6, 3) for pid in (1, 2)]
    said = [*BEFORE, *late, *begun((1, 2), 7, 10.06), *steps((1, 2), (7,), 11.0)]
    assert recovery(said, 3, 3, KILLED_AT) is None  # not whole yet
    said += steps((1, 2, 8), (8,), 12.0)
    assert recovery(said, 3, 3, KILLED_AT) == pytest.approx(Recovery(1.5, 1, 2.5))


def test_steps_of_some_that_are_left_are_no_recovery():
    said = [*BEFORE, *steps((1,), (6, 7), 10.1), *steps((1, 2, 8), (8,), 12.0)]
    found = recovery(said, 3, 3, KILLED_AT)
    assert found is not None
    assert found.seconds == pytest.approx(2.5)


def test_ranks_that_start_again_repeat_what_came_after_their_checkpoint():
    again = steps((7, 8, 9), (2, 3, 4), 15.0, generation=1)
    found = recovery([*BEFORE, *again], 3, 3, KILLED_AT)
    assert found == pytest.approx(Recovery(5.5, 1 + 4, 5.5))  # 2, 3, 4, 5, and 6


def test_a_step_ends_when_all_have_committed_it():
    assert step_us(steps((1, 2), range(5), 1.0)) == pytest.approx(500_000)


def test_smddp_goes_on(tmp_path):
    arguments = ("recovery", "--variants", "smddp", "--ranks", "3", "--repeats", "1", "--kills")
    result = CliRunner().invoke(app, [*arguments, "1", "--json", str(tmp_path / "r.json")])
    assert result.exit_code == 0, result.output
    measured = json.loads((tmp_path / "r.json").read_text())["measurements"][0]
    assert measured["lost_steps"] in ([0], [1])
    assert 0 < measured["rounds_us"][0] <= 1e6 * measured["whole_s"][0]
    assert measured["step_us"] > 0


def test_torchft_is_measured_where_it_is_installed():
    result = CliRunner().invoke(app, ["recovery", "--variants", "torchft"])
    assert result.exit_code == 1
    assert "not measured: torchft: needs a virtual environment" in result.output
