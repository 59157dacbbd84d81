"""What counts as a difference between the ranks' weights at the end of an epoch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from sdp_plugins.keras.rank_consistency import _differs


@pytest.mark.parametrize(
    ("dtype", "rounding", "assignment"),
    [
        ("float64", 1e-12, 1e-6),
        ("float32", 1e-6, 1e-3),
        ("float16", 1e-3, 1e-1),
        (ml_dtypes.bfloat16, 4e-3, 1e-1),
    ],
)
def test_rounding_is_no_difference(dtype: object, rounding: float, assignment: float) -> None:
    values = np.linspace(-2, 2, 64).astype(dtype)  # type: ignore[call-overload]
    wide = values.astype(np.float64)
    assert not _differs((wide * (1 + rounding)).astype(values.dtype), values, True)
    assert _differs((wide + 2 * assignment).astype(values.dtype), values, True)


def test_integers_and_missing_numbers() -> None:
    counts = np.arange(4)
    assert not _differs(counts.copy(), counts, True)
    assert _differs(counts + (counts == 3), counts, True)
    lost = np.array([1.0, np.nan])
    assert not _differs(lost.copy(), lost, True)
    assert _differs(np.array([1.0, 1.0]), lost, True)
    masked = np.array([1.0, -np.inf])
    assert not _differs(masked.copy(), masked, True)
    assert _differs(np.array([2.0, -np.inf]), masked, True)


def test_every_bit_counts_where_ranks_round_alike() -> None:
    values = np.linspace(-2, 2, 64, dtype=np.float32)
    assert not _differs(values.copy(), values, False)
    assert _differs(np.nextafter(values, np.float32(4)), values, False)
