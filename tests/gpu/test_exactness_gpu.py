"""On a device, the gradient equals that of the whole batch, wherever the batch is stored."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Microbatcher
from automicro.batch.tensors import map_tensors
from tests.cases import difference, gradients
from tests.gpu.device import DEVICE, GPU
from tests.gpu.subjects import ROWS, batch, microbatcher, model
from tests.oracle.drawing import alone
from tests.oracle.forms import FORMS
from tests.oracle.jobs import Job

pytestmark = GPU

# Oracle jobs: models, wirings, losses, and batches that a forward does not read on the host.
INGREDIENTS = {
    "model": ("mlp", "lstm", "encoder layer", "tied weights", "conv over time", "GPT-2"),
    "wiring": ("loss_fn", "Composer"),
    "loss": ("a sum", "a masked mean"),
    "form": [
        name
        for name, form in FORMS.items()
        if not form.edits and name not in ("texts", "only texts", "arrays")
    ],
}
CASES = {
    f"{axis}: {name}": dataclasses.replace(alone(axis, name), declares=axis == "loss")
    for axis, names in INGREDIENTS.items()
    for name in names
}


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("name", CASES)
def test_microbatched_gradient_equals_full_batch_gradient(name: str, where: str) -> None:
    found = []
    for size in (None, 1, 3, 5):
        job = Job(CASES[name])
        net = job.model.to(DEVICE)
        rows = job.make_batch(job.contents[0], 0)
        if where == "device" or size is None:
            rows = map_tensors(rows, lambda tensor: tensor.to(DEVICE))
        if size is None:
            job.whole(rows)[0].backward()
        else:
            job.microbatchers(size)[0].backward(rows)
        found.append(gradients(net))
    assert max(difference(found[0], each) for each in found[1:]) < 1e-9


def test_microbatched_bf16_error_matches_full_batch_bf16() -> None:
    found = {}
    for precision, size in (("fp32", ROWS), ("bf16", ROWS), ("bf16", 3)):
        net = model().eval()  # no dropout, because its mask depends on the cut
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
def test_microbatch_with_all_targets_ignored_adds_zero(make: Any) -> None:
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


def test_forward_may_compute_gradient_of_its_own_graph() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)

    def penalty(model: Any, batch: Tensor) -> Any:
        inputs = batch.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    microbatcher = Microbatcher(net, forward=penalty, microbatch_size=4)
    for _ in range(2):
        microbatcher.backward(torch.randn(12, 6))
    assert microbatcher.loss_average_is == "checked"
