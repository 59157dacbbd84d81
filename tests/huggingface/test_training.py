"""What Trainer and accelerate do over smddp is what they do over gloo, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Pool, run_ranks

pytest.importorskip("transformers")

from tests.huggingface import cases


def on_both(pool: Pool, case: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Any]]:
    """A case's results over smddp and over gloo, in rank order."""
    return pool(2).run(case, "smddp", *args), pool(2).run(case, "gloo", *args)


def test_trainer(rank_pool: Pool, tmp_path: Path) -> None:
    ours, gloos = on_both(rank_pool, cases.fit, str(tmp_path), {})
    assert ours[0] == ours[1]
    buckets = ours[0].pop("buckets")
    gloos[0].pop("buckets")
    assert ours[0] == gloos[0]
    assert len(set(ours[0]["losses"])) == 4  # in each step another
    assert [entry["eval_rows"] for entry in ours[0]["evaluations"]] == [7, 7]
    assert buckets == 4


def test_accumulated_gradients_are_reduced_once(rank_pool: Pool, tmp_path: Path) -> None:
    arguments = {"gradient_accumulation_steps": 3, "average_tokens_across_devices": False}
    ours, gloos = on_both(rank_pool, cases.fit, str(tmp_path), arguments)
    assert [rank.pop("buckets") for rank in (*ours, *gloos)] == [4, 4, 0, 0]
    assert ours == gloos


def test_large_layers_write_into_buckets(rank_pool: Pool, tmp_path: Path) -> None:
    ours, gloos = on_both(rank_pool, cases.write_directly, str(tmp_path))
    for rank, of_gloo in zip(ours, gloos, strict=True):
        assert rank[:3] == of_gloo[:3] == ours[0][:3]
        assert rank[3:] == (2 * 8, True)  # eight layers, from the third of four steps on
        assert of_gloo[3:] == (0, False)


def test_layers_write_only_where_gradients_are_views(rank_pool: Pool, tmp_path: Path) -> None:
    ours, gloos = on_both(rank_pool, cases.own_options, str(tmp_path))
    assert ours == [(True, {"module"}, False, set(), False, 0)] * 2
    assert gloos == [(True, set(), False, set(), False, 0)] * 2


def test_resumed_training_is_the_same(rank_pool: Pool, tmp_path: Path) -> None:
    for whole, resumed in rank_pool(2).run(cases.stop_and_resume, "smddp", str(tmp_path)):
        assert whole == resumed
        assert len(whole[0]) == 6


def test_arguments_of_ddp_arrive(rank_pool: Pool, tmp_path: Path) -> None:
    ours, gloos = on_both(rank_pool, cases.unused, str(tmp_path), True)
    assert ours == gloos
    assert len(ours[0]) == 4
    for text in rank_pool(2).run(cases.unused, "smddp", str(tmp_path), False):
        assert "Expected to have finished reduction" in text


def test_what_accelerate_gathers(rank_pool: Pool) -> None:
    ours, gloos = on_both(rank_pool, cases.collectives)
    assert [rank.pop("backend") for rank in (*ours, *gloos)] == ["smddp"] * 2 + ["gloo"] * 2
    for rank in (*ours, *gloos):
        assert rank == {
            "type": "MULTI_CPU",
            "padded": [0, 1, -1, 10, 11, 12],
            "metrics": [[0, 1, 2, 3], [4, 5, 6]],
            "mean": [0.5],
            "sum": 3,
            "objects": [{"rank": 0}, {"rank": 1}],
            "told": ["of 0"],
        }


def test_accumulation_and_checkpoints_of_accelerate(rank_pool: Pool, tmp_path: Path) -> None:
    ours, gloos = on_both(rank_pool, cases.accumulate, str(tmp_path))
    assert [rank.pop("buckets") for rank in (*ours, *gloos)] == [2, 2, 0, 0]
    assert ours == gloos
    assert ours[0] == ours[1]
    assert ours[0]["wrapped"]
    assert ours[0]["trained"] == ours[0]["loaded"]


def test_jobs_over_gloo_stay_as_they_are(tmp_path: Path) -> None:
    assert run_ranks(2, cases.over_gloo, str(tmp_path)) == [("gloo", True)] * 2
