"""The gradient is the whole batch's on a device too, from wherever the batch comes."""

import pytest
import torch
from torch import Tensor

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
