"""On a device, the gradient equals that of the whole batch, wherever the batch is stored."""

import dataclasses

import pytest
import torch

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
    found = []
    for precision, size in (("fp32", ROWS), ("bf16", ROWS), ("bf16", 3)):
        net = model().eval()  # no dropout, because its mask depends on the cut
        microbatcher(net, size, precision=precision).backward(batch())
        found.append(torch.cat([each.grad.flatten() for each in net.parameters()]))  # type: ignore[union-attr]
    exact, *others = found
    whole, split = (float((each - exact).norm() / exact.norm()) for each in others)
    assert 0 < split < 2 * whole + 1e-4
