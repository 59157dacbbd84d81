"""Keras on torch with its variables on a GPU trains as on CPUs; skipped without one."""

from __future__ import annotations

import pytest

pytest.importorskip("keras")
torch = pytest.importorskip("torch")


@pytest.mark.skipif(not torch.cuda.device_count(), reason="there is no GPU")
@pytest.mark.parametrize("flags", ["1", "0"])
def test_trains_as_on_cpus(flags: str) -> None:
    from tests.keras.test_torch_devices import assert_trains_as_on_cpus

    assert_trains_as_on_cpus("cuda", flags)
