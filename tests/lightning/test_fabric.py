"""Fabric over smddp, in both Lightning packages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lightning import cases
from tests.lightning.models import FABRICS
from tests.ranks import RankPool

pytestmark = pytest.mark.parametrize("package", FABRICS)


@pytest.mark.parametrize("strategy", ["smddp", "smddp_find_unused_parameters_true"])
def test_loop(rank_pool: Callable[[int], RankPool], package: str, strategy: str) -> None:
    first, second = rank_pool(2).run(cases.fabric, package, strategy)
    assert (first["backend"], first["sampler"]) == ("smddp", "DistributedSampler")
    assert first["batches"] == second["batches"] == 4
    assert first["digest"] == second["digest"]
    for result in (first, second):
        assert result["object"] == ["from", 0]
        assert result["mean"].item() == 0.5
        assert result["gathered"].tolist() == [0, 1]
        assert result["views"]
