"""Keras on torch with its variables on a GPU trains as on CPUs; skipped without one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("keras")
torch = pytest.importorskip("torch")


@pytest.mark.skipif(not torch.cuda.device_count(), reason="there is no GPU")
def test_trains_as_on_cpus(rank_pools: Any) -> None:
    from tests.keras.first_ranks import first_ranks
    from tests.keras.test_torch_devices import assert_trains_as_on_cpus

    assert_trains_as_on_cpus("cuda", lambda backend, n: first_ranks(rank_pools, backend, n))
