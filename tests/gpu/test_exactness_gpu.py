"""The gradient equals that of the whole batch on a device, too, for batches from any place."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Microbatcher
from automicro.batch.tensors import map_tensors
from tests.cases import MODELS, STRUCTURES, Case, difference, gradients
from tests.gpu.device import DEVICE, GPU
from tests.gpu.subjects import ROWS, batch, microbatcher, model
from tests.models import SIZES

pytestmark = GPU

CASES = {**{f"model: {n}": c for n, c in MODELS.items()},
         **{f"batch: {n}": c for n, c in STRUCTURES.items()}}  # fmt: skip


def whole_batch_on_device(case: Case) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    net = case.model().to(DEVICE)
    loss = case.loss(net, map_tensors(case.batch(), lambda tensor: tensor.to(DEVICE)))
    loss.backward()
    return gradients(net)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_whole_batch(name: str, where: str) -> None:
    case = CASES[name]
    expected = whole_batch_on_device(case)
    for size in SIZES:
        torch.manual_seed(1)
        net = case.model().to(DEVICE)
        rows = case.batch()
        if where == "device":
            rows = map_tensors(rows, lambda tensor: tensor.to(DEVICE))
        case.microbatcher(net, size).backward(rows)
        assert difference(gradients(net), expected) < case.tolerance, size


def test_bf16_in_microbatches_is_as_near_to_fp32_as_bf16_whole() -> None:
    found = {}
    for precision, size in (("fp32", ROWS), ("bf16", ROWS), ("bf16", 3)):
        net = model().eval()  # no dropout, whose mask depends on the cut
        microbatcher(net, size, precision=precision).backward(batch())
        found[precision, size] = torch.cat(
            [
                parameter.grad.flatten()
                for parameter in net.parameters()
                if parameter.grad is not None
            ]
        )
    exact = found["fp32", ROWS]
    whole, split = (
        float((found["bf16", size] - exact).norm() / exact.norm()) for size in (ROWS, 3)
    )
    assert 0 < split < 2 * whole + 1e-4


def own_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    counted = targets != -100
    return (each * counted).sum() / counted.sum()


def with_layer() -> Any:
    options = vars(nn)["LinearCrossEntropyOptions"]()  # its forward computes the gradient
    return vars(nn)["LinearCrossEntropyLoss"](4, 4, options=options).to(DEVICE)


@pytest.mark.parametrize("make", [lambda: nn.CrossEntropyLoss(), lambda: own_mean, with_layer])
def test_a_microbatch_whose_targets_are_all_ignored_on_the_device_adds_zero(make: Any) -> None:
    if make is with_layer and not hasattr(nn, "LinearCrossEntropyLoss"):
        pytest.skip("torch has no LinearCrossEntropyLoss yet")
    targets = torch.arange(12).remainder(4).index_fill(0, torch.arange(4), -100).to(DEVICE)
    found = []
    for size in (None, 4, 3):
        torch.manual_seed(1)
        net, loss_fn = nn.Linear(6, 4).to(DEVICE), make()
        microbatcher = Microbatcher(
            net, loss_fn=loss_fn, loss_average="tokens", microbatch_size=size, probe=False
        )
        microbatcher.backward((torch.ones(12, 6, device=DEVICE).cumsum(0) / 12, targets))
        found.append(gradients(net))
    assert max(difference(found[0], each) for each in found[1:]) < 1e-5


def test_a_gradient_inside_of_a_forward_is_of_its_own_graph_on_the_device_too() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)

    def penalty(model: Any, batch: Tensor) -> Any:
        inputs = batch.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    microbatcher = Microbatcher(net, forward=penalty, microbatch_size=4)
    for _ in range(2):
        microbatcher.backward(torch.randn(12, 6))
    assert microbatcher.loss_average_is == "checked"
