"""Models train on the simulated device, with the CPU's numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests import simdev
from tests.simdev.cases import OnDevice

on_device = OnDevice(__name__)


def equal_on_both(compute: Callable[[str], list[Tensor]]) -> None:
    for ours, theirs in zip(compute("simdev"), compute("cpu"), strict=True):
        assert ours.cpu().isfinite().all()
        assert torch.equal(ours.cpu(), theirs)


def train(device: str, model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    model = wrap(model.to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [(torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))) for _ in range(3)]
    torch.manual_seed(1)  # of dropout
    for images, labels in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
    return [*model.state_dict().values(), loss.detach()]


def network() -> nn.Module:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Dropout(0.1), nn.Linear(392, 10))


@on_device
def a_network_trains_as_on_the_cpu() -> None:
    equal_on_both(lambda device: train(device, network(), lambda model: model))
    assert simdev.synchronous_ops() == []


@on_device
def layers_and_losses_are_the_cpus() -> None:
    layers = [
        (nn.Embedding(5, 4), torch.tensor([[1, 2], [3, 1]])),
        (nn.LayerNorm(4), torch.randn(2, 4)),
        (nn.GroupNorm(2, 4), torch.randn(2, 4, 5)),
        (nn.ConvTranspose2d(3, 4, 3), torch.randn(2, 3, 5, 5)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)),
        (nn.AdaptiveAvgPool2d(1), torch.randn(1, 2, 6, 6)),
        (nn.GELU(), torch.randn(3)),
        (nn.SiLU(), torch.randn(3)),
    ]

    def compute(device: str) -> list[Tensor]:
        found = []
        for layer, inputs in layers:
            torch.manual_seed(0)
            moved = layer.to(device)
            moved.zero_grad()
            given = inputs.to(device).requires_grad_(inputs.is_floating_point())
            outputs = moved(given)
            for loss in (
                functional.mse_loss,
                functional.l1_loss,
                functional.smooth_l1_loss,
                functional.binary_cross_entropy_with_logits,
            ):
                loss(outputs, torch.zeros_like(outputs)).backward(retain_graph=True)
            found += [outputs.detach(), *(each.grad.clone() for each in moved.parameters())]
        return found

    equal_on_both(compute)


@on_device
def gradients_are_right_where_the_input_has_none() -> None:
    def compute(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        layer, inputs = nn.BatchNorm1d(4).to(device), torch.randn(6, 4).to(device)
        (layer(inputs) ** 3).sum().backward()
        return [each.grad for each in layer.parameters()]

    equal_on_both(compute)


@on_device
def operators_of_synchronized_batch_norm() -> None:
    """On one rank; torch's own tests, which tests/torch/suite runs, have several."""
    inputs, out = torch.randn(6, 4, 3), torch.randn(6, 4, 3)
    plain = nn.BatchNorm1d(4)
    given = inputs.clone().requires_grad_()
    plain(given).backward(out)
    x, y, running, ones = (t.to("simdev") for t in (inputs, out, torch.zeros(4), torch.ones(4)))
    parts = [torch.batch_norm_stats(part, 1e-5) for part in x.split([2, 4])]
    counts = torch.tensor([6.0, 12.0]).to("simdev")
    means, others = (torch.stack(each) for each in zip(*parts, strict=True))
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        x, means, others, running, None, 0.1, 1e-5, counts
    )
    normal = torch.batch_norm_elemt(x, None, None, mean, invstd, 1e-5)
    *sums, of_weight, of_bias = torch.batch_norm_backward_reduce(
        y, x, mean, invstd, ones, True, True, True
    )
    of_input = torch.batch_norm_backward_elemt(y, x, mean, invstd, ones, *sums, counts.int())
    found = [each.cpu() for each in (normal, running, of_weight, of_bias, of_input)]
    gradients = [plain.weight.grad, plain.bias.grad, given.grad]
    expected = [plain(inputs).detach(), plain.running_mean / 1.9, *gradients]  # after two batches
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@on_device
def optimizers_are_the_cpus() -> None:
    def compute(device: str) -> list[Tensor]:
        found = []
        for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            for kwargs in ({"foreach": True}, {"foreach": False}):
                torch.manual_seed(0)
                weights = [torch.randn(5, 3).to(device).requires_grad_() for _ in range(3)]
                steps = optimizer(weights, lr=0.1, **kwargs)
                for _ in range(3):
                    steps.zero_grad()
                    sum((each**2).sum() for each in weights).backward()
                    nn.utils.clip_grad_norm_(weights, 1.0)
                    steps.step()
                found += [each.detach() for each in weights]
        return found

    equal_on_both(compute)


@on_device
def mixed_precision_trains() -> None:
    model = nn.Linear(4, 4).to("simdev")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("simdev")
    for factor in (1.0, float("inf")):
        before = model.weight.detach().cpu()
        with torch.autocast("simdev", dtype=torch.float16):
            outputs = model(torch.ones(2, 4, device="simdev"))
            loss = functional.mse_loss(outputs, torch.zeros_like(outputs)) * factor
        assert (outputs.dtype, loss.dtype) == (torch.float16, torch.float32)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(model.weight.detach().cpu(), before) is (factor != 1.0)
    assert scaler.get_scale() == 32768


@on_device
def random_numbers_are_the_cpus() -> None:
    def compute(device: str) -> list[Tensor]:
        torch.manual_seed(5)
        generator = torch.Generator(device).manual_seed(7)
        return [
            torch.randn(5, device=device),
            torch.rand(5, device=device),
            torch.randint(9, (5,), device=device),
            torch.randperm(5, device=device),
            functional.dropout(torch.ones(50, device=device), 0.5),
            torch.rand(5, device=device, generator=generator),
        ]

    equal_on_both(compute)
    state = torch.simdev.get_rng_state()
    first = torch.rand(3, device="simdev").cpu()
    torch.simdev.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="simdev").cpu(), first)


@on_device
def reads_of_values_wait() -> None:
    values = torch.tensor([3.0, 0.0, 1.0], device="simdev")
    gate = simdev.gate()
    gate.block()
    values += 1
    opener = threading.Timer(0.01, gate.open)
    opener.start()
    assert values[values > 1.5].tolist() == [4.0, 2.0]
    opener.join()
    assert values.nonzero().shape == (3, 1)
    assert torch.equal(values, values.clone())
    assert values.unique().shape == (3,)


@on_device
def layouts_types_and_devices_are_copied() -> None:
    values = torch.randn(4, 6)
    ours = values.to("simdev")
    assert torch.equal(ours.t().cpu(), values.t())
    assert torch.equal(ours.t().to("cpu", torch.double), values.t().double())
    assert torch.equal(torch.empty(6, 4).t().copy_(ours), values)
    assert torch.equal(ours[:, ::2].copy_(values[:, 1::2]).cpu(), values[:, 1::2])
    assert torch.equal(ours.to("simdev:1")[0].cpu(), ours[0].cpu())
    assert torch.equal(
        torch.view_as_complex(values.view(4, 3, 2)).to("simdev").conj().cpu().imag,
        -values.view(4, 3, 2)[..., 1],
    )
    storage = ours.untyped_storage()
    storage.resize_(0)
    storage.resize_(96)
    assert ours.zero_().sum().item() == 0


@on_device
def backward_runs_from_several_threads_on_the_streams_of_forward() -> None:
    found: dict[int, float] = {}

    def work(index: int) -> None:
        with torch.Stream(device="simdev"):
            torch.accelerator.current_stream().wait_stream(torch.simdev.default_stream())
            weight = torch.full((4,), float(index), device="simdev", requires_grad=True)
            for _ in range(10):
                (weight * weight).sum().backward()
            assert weight.grad is not None
            found[index] = weight.grad.sum().item()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: index * 80.0 for index in range(4)}


class Finished(dist._Work):
    """A collective that its stream will have done."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        self.future: Any = torch.futures.Future(devices=[torch.device("simdev", 0)])
        self.future.set_result(result)

    def wait(self, timeout: object = None) -> bool:
        self.future.wait()
        return True

    def get_future(self) -> Any:
        return self.future


class Doubling(dist.ProcessGroup):
    """Two ranks with equal gradients, all in this process. Sums on a stream of its own."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.side = torch.Stream(device="simdev")

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> Finished:
        self.side.wait_stream(torch.accelerator.current_stream())
        with self.side:
            for tensor in tensors:
                tensor.mul_(2)
            return Finished(tensors)

    def broadcast(self, tensors: list[Tensor], opts: object = None) -> Finished:
        return Finished(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for tensors, tensor in zip(outputs, inputs, strict=True):
            for each in tensors:
                each.copy_(tensor)
        return Finished([])

    def getBackendName(self) -> str:
        return "doubling"


@on_device
def ddp_trains_as_without() -> None:
    def make(_store: object, rank: int, size: int, _timeout: object) -> Doubling:
        return Doubling(rank, size)

    def wrap(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=1e-3)

    dist.Backend.register_backend("doubling", make, devices=["simdev"])
    dist.init_process_group("doubling", store=dist.HashStore(), rank=0, world_size=2)
    alone = train("cpu", network(), lambda model: model)
    for ours, theirs in zip(train("simdev", network(), wrap), alone, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    dist.destroy_process_group()


test_case = on_device.test()
