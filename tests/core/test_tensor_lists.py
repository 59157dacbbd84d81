"""Which tensors of a list are reduced together."""

from __future__ import annotations

import pytest

from sdp_plugins.core import DType, Group
from sdp_plugins.core.shared_malloc import LARGE_NBYTES
from sdp_plugins.core.tensor_lists import FusedAllReduce

SMALL, LARGE = LARGE_NBYTES // 4 - 1, LARGE_NBYTES // 4  # elements of 4 bytes


@pytest.mark.parametrize(
    ("in_place", "together"),
    [
        (False, [[2], [0, 1, 3, 5, 6], [4, 7]]),
        (True, [[2], [0, 3], [1, 5, 6], [4, 7]]),
    ],
)
def test_tensors_in_registered_memory_are_reduced_apart_from_others(
    in_place: bool, together: list[list[int]]
) -> None:
    types = [DType.float32, DType.int32]
    counts = [SMALL, LARGE, None, 3, LARGE, LARGE, 2 * LARGE, LARGE]
    sizes = [(n, types[index in (4, 7)]) for index, n in enumerate(counts)]
    seen: list[list[int]] = []

    def reduce(members: list[int]) -> list[int]:
        seen.append(members)
        return [100 + index for index in members]

    with Group.from_env(timeout_s=100) as group:
        lists = FusedAllReduce(group, in_place)
        assert lists.by_bucket(range(len(sizes)), sizes, "sum", reduce) == list(range(100, 108))
    assert seen == together
