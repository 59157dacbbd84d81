"""What Trainer offers works over smddp, in both Lightning packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdp_plugins.lightning.namespaces import strategy_class
from tests.lightning import cases
from tests.lightning.models import PACKAGES, data, loader, net
from tests.ranks import Pool

pytestmark = pytest.mark.parametrize("package", PACKAGES)


def test_fit(rank_pool: Pool, package: str, tmp_path: Path) -> None:
    first, second = rank_pool(2).run(cases.fit, package, str(tmp_path))
    ours = {"lightning.pytorch": "pytorch", "pytorch_lightning": "standalone.pytorch"}[package]
    assert (first["backend"], first["strategy"]) == ("smddp", f"sdp_plugins.lightning.{ours}")
    assert first["digest"] == second["digest"]
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["rank"] == 4.0  # the sum over ranks 0 and 1 in four batches
    assert (first["epochs"], first["steps"]) == (2, 4)  # stopped; two batches make a step
    assert first["sampler"] == "DistributedSampler"
    seen = torch.cat([first["seen"], second["seen"]])
    assert torch.equal(seen.sort().values, data()[:][0][:, 0].sort().values)
    assert first["best"] == second["best"]
    assert len(list(tmp_path.glob("*.ckpt"))) == 2


def test_training_again_after_an_error(rank_pool: Pool, package: str) -> None:
    (error, digest), (other_error, other_digest) = rank_pool(2).run(cases.fit_again, package)
    assert "ArithmeticError" in (error, other_error)
    assert digest == other_digest


def test_rank_zero_prepares_the_data(rank_pool: Pool, package: str, tmp_path: Path) -> None:
    assert rank_pool(2).run(cases.prepare, package, str(tmp_path)) == [["by rank 0"]] * 2


def test_validate_test_and_predict(rank_pool: Pool, package: str) -> None:
    results = rank_pool(2).run(cases.evaluate, package)
    with torch.no_grad():
        outputs = net()(data()[:][0])
        loss = nn.functional.mse_loss(outputs, data()[:][1]).item()
    for rank, result in enumerate(results):
        assert result["val"]["val_loss"] == pytest.approx(loss, rel=1e-5)
        assert result["test"]["test_loss"] == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(result["predicted"], outputs[rank::2])


def test_resumed_training_is_the_same(rank_pool: Pool, package: str, tmp_path: Path) -> None:
    results = rank_pool(2).run(cases.resume, package, str(tmp_path))
    assert len({digest for pair in results for digest in pair}) == 1


def single_process_steps() -> list[Tensor]:
    """Five steps of one process with the doubled batch."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for x, y in loader(8, 8 * 5):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


def test_layers_write_large_gradients(rank_pool: Pool, package: str) -> None:
    (digest, wrote, can_still), (other, *_) = rank_pool(2).run(cases.large_layers, package, False)
    assert wrote == [False, False, True, True]  # the first two steps tell where
    assert not can_still
    copied, wrote, _ = rank_pool(2).run(cases.large_layers, package, True)[0]
    assert not wrote
    assert digest == other == copied


@pytest.mark.parametrize("arguments", [None, {"static_graph": True, "bucket_cap_mb": 0.0001}])
def test_two_ranks_equal_one_with_the_doubled_batch(
    rank_pool: Pool, package: str, arguments: dict[str, Any] | None
) -> None:
    strategy = "smddp" if arguments is None else strategy_class(package)(**arguments)
    first, second = rank_pool(2).run(cases.five_steps, package, {"strategy": strategy})
    for one, other, expected in zip(first, second, single_process_steps(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)


def test_bf16_mixed(rank_pool: Pool, package: str) -> None:
    first, second = rank_pool(2).run(cases.five_steps, package, {"precision": "bf16-mixed"})
    for one, other, expected in zip(first, second, single_process_steps(), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, rtol=0.05, atol=0.02)


def test_unused_parameters(rank_pool: Pool, package: str) -> None:
    strategy = "smddp_find_unused_parameters_true"
    first, second = rank_pool(2).run(cases.unused_parameters, package, strategy)
    assert first == second and "Error" not in first


def test_unused_parameters_have_a_remedy(rank_pool: Pool, package: str) -> None:
    texts = rank_pool(2).run(cases.unused_parameters, package, "smddp")
    assert any("strategy='smddp_find_unused_parameters_true'" in text for text in texts)


def test_primitives(rank_pool: Pool, package: str) -> None:
    for rank, result in enumerate(rank_pool(2).run(cases.primitives, package)):
        assert result["object"] == {"rank": 1, "list": [1, 2]}
        assert result["mean"].tolist() == [0.5, 3.0]
        assert result["sum"].tolist() == [1, 6]
        assert result["integer mean"].tolist() == [0, 5, 4]  # as over gloo
        assert result["gathered"].tolist() == [[1.0, 1.0], [2.0, 2.0]]
        assert result["gradient"].tolist() == [[2.0, 2.0], [20.0, 20.0]][rank]
        assert result["module"].tolist() == [0, 1]
        assert result["decisions"] == [False, True]
