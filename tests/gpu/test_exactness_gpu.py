"""On a device, the gradient equals that of the whole batch, wherever the batch is stored."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Contrastive, Microbatcher
from automicro.batch.tensors import map_tensors
from automicro.contrastive import InfoNCE
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


def made() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Return a model, a copy of it, rows and targets, of which the first 11 are ignored."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 16))
    targets = (torch.arange(32) % 16).index_fill(0, torch.arange(11), -100)
    net = net.double().to(DEVICE)
    return net, copy.deepcopy(net), torch.randn(32, 64, dtype=torch.float64), targets


@pytest.mark.parametrize("frozen", [False, True])
def test_exact_batchnorm_and_ignored_targets_match_whole_batch(frozen: bool) -> None:
    net, plain, rows, targets = made()
    loss_fn, options = nn.CrossEntropyLoss(), dict[str, Any](batchnorm="exact")
    if frozen:  # two microbatches have no targets
        net.eval(), plain.eval()
        options = {"loss_average": "tokens"}
    else:
        targets = targets.clamp(min=0)
    Microbatcher(net, loss_fn=loss_fn, microbatch_size=5, **options).backward((rows, targets))
    loss_fn(plain(rows.to(DEVICE)), targets.to(DEVICE)).backward()
    assert difference(gradients(net), gradients(plain)) < 1e-9
    for one, other in zip(net.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-12, atol=0)


def test_sliced_contrastive_loss_matches_whole_batch() -> None:
    encoder, plain, rows, _ = made()
    encoder.eval(), plain.eval()
    loss = InfoNCE(trains_temperature=False, microbatch_size=7)
    net = Contrastive({"one": encoder, "other": encoder}, loss, microbatch_size=5)
    options: Any = {"microbatch_size": None, "eval_microbatch_size": None}
    step = Microbatcher(net, loss_average="samples", **options)
    step.backward({"one": rows, "other": rows.flip(1)})
    one, other = (F.normalize(plain(each.to(DEVICE))) for each in (rows, rows.flip(1)))
    scores, right = one @ other.T / loss.temperature, torch.arange(32, device=DEVICE)
    ((F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2).backward()
    assert difference(gradients(encoder), gradients(plain)) < 1e-6  # a float32 temperature
