"""The costs of a network: measured once, equal on all ranks, kept in a file where one is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from sdp_plugins.core import Group, RendezvousError
from sdp_plugins.core.internode import calibration, spanning_group
from sdp_plugins.core.internode.costs import Costs
from tests.internode.spanning import meet
from tests.ranks import RankPool

Pool = Callable[[int], RankPool]
GIVEN = Costs(1e-4, 2e-5, 3e-5, 4e-9, 5e-10)


def make_groups(
    rank: int, world: int, root: str, path: str | None, known_to: tuple[int, ...]
) -> tuple[list[str], int]:
    """Two groups, one after the other: their costs, and how often this rank measured."""
    os.makedirs(root, exist_ok=True)
    calibration._known.clear()
    if rank in known_to:
        calibration._known["gloo"] = GIVEN
    found = []
    environment = {"SDP_CALIBRATION": path} if path else {}
    measure = mock.Mock(side_effect=calibration.calibrate)
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(spanning_group, "calibrate", measure),
    ):
        for name in ("one", "two"):
            group = meet("2x2", root, name)
            found.append(costs_of(group).to_json())
            group.close()
    return found, measure.call_count


def costs_of(group: Group) -> Costs:
    costs: Costs = group._native.costs
    return costs


def test_measured_once_and_equal_everywhere(rank_pool: Pool, tmp_path: Path) -> None:
    found = rank_pool(4).run(make_groups, str(tmp_path), None, ())
    assert [count for _, count in found] == [1] * 4
    costs = {text for texts, _ in found for text in texts}
    assert len(costs) == 1
    measured = Costs.from_json(costs.pop())
    assert measured != Costs()
    assert 1e-6 < measured.latency_s < 1
    assert 1e-12 < measured.byte_s < 1e-6


def test_rank_0_counts(rank_pool: Pool, tmp_path: Path) -> None:
    """What it knows, all go by, whatever they know."""
    found = rank_pool(4).run(make_groups, str(tmp_path / "known"), None, (0, 2))
    assert found == [([GIVEN.to_json()] * 2, 0)] * 4


def test_what_others_know_does_not_count(rank_pool: Pool, tmp_path: Path) -> None:
    found = rank_pool(4).run(make_groups, str(tmp_path / "unknown"), None, (1, 3))
    assert [count for _, count in found] == [1] * 4
    assert len({text for texts, _ in found for text in texts} - {GIVEN.to_json()}) == 1


def test_a_file_keeps_it(rank_pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    measured = rank_pool(4).run(make_groups, str(tmp_path / "first"), str(path), ())
    assert [count for _, count in measured] == [1] * 4
    assert Costs.from_json(path.read_text()).to_json() == measured[0][0][0]
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["costs.json"]
    path.write_text(GIVEN.to_json())
    read = rank_pool(4).run(make_groups, str(tmp_path / "second"), str(path), ())
    assert read == [([GIVEN.to_json()] * 2, 0)] * 4


def refused(rank: int, world: int, root: str, path: str) -> str:
    calibration._known.clear()
    with mock.patch.dict(os.environ, {"SDP_CALIBRATION": path if rank == 0 else ""}):
        try:
            meet("2x2", root, "refused").close()
        except RendezvousError as error:
            return str(error)
    return "made"


def test_what_rank_0_cannot_read_all_refuse(rank_pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("nothing of that kind")
    for text in rank_pool(4).run(refused, str(tmp_path), str(path)):
        assert f"SDP_CALIBRATION={path}" in text
        assert "remove the file" in text


def test_a_file_of_another_network_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    calibration.remember("one", GIVEN, str(path))
    assert calibration.known("other", str(path)) is None
    calibration._known.pop("one")
    assert calibration.known("one", str(path)) == GIVEN
    calibration._known.pop("one")


def test_a_file_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="costs.json cannot be written: No such file"):
        calibration.remember("none", GIVEN, str(tmp_path / "missing" / "costs.json"))
    assert calibration.known("none", None) == GIVEN
    calibration._known.pop("none")


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("[1, 2]")
    calibration._known.pop("none", None)
    with pytest.raises(ValueError, match=r"SDP_CALIBRATION=\S+costs.json: these are no costs"):
        calibration.known("none", str(path))
