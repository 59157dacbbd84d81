"""Parts of a model that are exchanged in turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_plugins.core.local_updates.parameters import divide


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.data())
def test_fragments_have_about_equal_sizes(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    parts = divide(sizes, count)
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    assert len(parts) == count
    assert all(part == sorted(part) and part for part in parts)
    totals = [sum(sizes[index] for index in part) for part in parts]
    assert max(totals) - min(totals) <= max(sizes)


def test_each_fragment_has_some_of_every_layer() -> None:
    layers = [64, 8] * 6  # weights and biases
    assert divide(layers, 3) == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_too_many_fragments() -> None:
    with pytest.raises(ValueError, match="Hint: make fragments at most that many"):
        divide([5, 5], 3)
    with pytest.raises(ValueError, match="no parameters that are trained"):
        divide([], 1)
