"""Results, random numbers, memory and threads of the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.standin import device as standin


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def convolution() -> nn.Module:
    body = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*body, nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 8), layer, nn.Flatten(), nn.Linear(48, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP": (perceptron, lambda: torch.randn(4, 5)),
    "convolutions": (convolution, lambda: torch.randn(4, 2, 8, 8)),
    "attention": (attention, lambda: torch.randint(11, (4, 6))),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


def train(device: str, name: str, optimizer_name: str) -> dict[str, Tensor]:
    make_model, make_inputs = MODELS[name]
    torch.manual_seed(1)
    model, inputs, targets = make_model(), make_inputs(), torch.tensor([0, 2, 1, 0])
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for _ in range(3):
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": loss.detach().cpu()} | {k: v.cpu() for k, v in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "AdamW") for name in MODELS), ("MLP", "SGD"), ("MLP", "AdamW, fused")],
)
def test_training_is_bit_identical_to_cpu(name: str, optimizer: str) -> None:
    with sdpa_kernel(SDPBackend.MATH):  # only the CPU has the fused kernel
        expected, found = train("cpu", name, optimizer), train("standin", name, optimizer)
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


def test_each_device_has_its_own_generator() -> None:
    torch.manual_seed(5)
    host = torch.get_rng_state()
    drawn = [torch.rand(4, device=f"standin:{index}").cpu() for index in (0, 1, 0)]
    assert torch.equal(host, torch.get_rng_state())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[0], torch.rand(4))
    own = torch.Generator("standin").manual_seed(5)
    assert torch.equal(torch.rand(4, device="standin", generator=own).cpu(), drawn[0])


def test_views_share_memory_and_copies_do_not() -> None:
    x = torch.zeros(4, 6, device="standin")
    for view in (x.t()[2], x[:, ::2], x.view(-1)[3:9], x.unfold(1, 3, 1), x.expand(2, 4, 6)[1]):
        before = x.sum().item()
        view.add_(1)
        assert x.sum().item() > before
    before = x.sum().item()
    x.clone().add_(1)
    x[torch.tensor([0, 1], device="standin")].add_(1)
    assert x.sum().item() == before


def test_dispatch_modes_do_not_see_kernel_internals() -> None:
    x, seen = torch.ones(3, device="standin"), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        F.layer_norm(x, (3,)).add_(1)
        standin.synchronize()
    assert seen == ["aten.native_layer_norm.default", "aten.add_.Tensor"]
