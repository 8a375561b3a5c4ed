"""Modules with their own microbatch size, and the same slices computed by hand."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro.batch.tensors import map_tensors, tensor_leaves

ROWS = 7


class Mlp(nn.Module):
    """A module in the middle of a model."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(p), nn.Linear(16, 3))

    def forward(self, hidden: Tensor) -> Any:
        return self.layers(hidden)


class MlpTail(Mlp):
    """The same module with its loss."""

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.layers(hidden), targets)


class SumTail(Mlp):
    """A tail that returns a summed loss."""

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.layers(hidden), targets, reduction="sum")


class Joint(nn.Module):
    """The joint network of a transducer: scores of each time and label, in four dimensions."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.out = nn.Linear(6, 5)
        self.dropout = nn.Dropout(p)

    def forward(self, times: Tensor, labels: Tensor) -> Any:
        return self.out(self.dropout(torch.tanh(times[:, :, None] + labels[:, None])))


class JointTail(Joint):
    """The same network with one loss per row."""

    def forward(self, times: Tensor, labels: Tensor, lengths: Tensor) -> Any:  # type: ignore[override]
        scores = super().forward(times, labels).log_softmax(-1)[..., 0]
        there = torch.arange(scores.shape[1]) < lengths[:, None]
        return (scores.sum(-1) * there).sum(1).neg().mean()


class Convolution(nn.Module):
    """A convolutional module in the middle of a model."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Dropout(p), nn.Conv2d(4, 2, 3)
        )

    def forward(self, images: Tensor) -> Any:
        return self.layers(images)


class TiedHead(nn.Module):
    """Use one weight twice, as embedding and head of a language model."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.dropout = nn.Dropout(p)

    def forward(self, tokens: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.dropout(hidden + self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


def targets(*shape: int, classes: int, ragged: bool) -> Tensor:
    found = torch.randint(classes, shape)
    if ragged:
        found[1:3] = -100
        found.reshape(-1)[-1] = -100
    return found


CASES: dict[str, Callable[[float, bool], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "mlp": lambda p, _: (Mlp(p), (floats(ROWS, 6),)),
    "mlp tail": lambda p, ragged: (
        MlpTail(p),
        (floats(ROWS, 6), targets(ROWS, classes=3, ragged=ragged)),
    ),
    "sum tail": lambda p, ragged: (
        SumTail(p),
        (floats(ROWS, 6), targets(ROWS, classes=3, ragged=ragged)),
    ),
    "joint": lambda p, _: (Joint(p), (floats(ROWS, 4, 6), floats(ROWS, 3, 6))),
    "joint tail": lambda p, ragged: (
        JointTail(p),
        (
            floats(ROWS, 4, 6),
            floats(ROWS, 3, 6),
            torch.randint(1, 5, (ROWS,)) if ragged else torch.full((ROWS,), 4),
        ),
    ),
    "convolution": lambda p, _: (Convolution(p), (floats(ROWS, 2, 5, 5),)),
    "tied tail": lambda p, ragged: (
        TiedHead(p),
        (
            torch.randint(11, (ROWS, 4)),
            floats(ROWS, 4, 6),
            targets(ROWS, 4, classes=11, ragged=ragged),
        ),
    ),
}


def make_part(name: str, *, p: float = 0.0, ragged: bool = True) -> tuple[Any, tuple[Any, ...]]:
    """Return a module in double precision and its arguments."""
    torch.manual_seed(3)
    part, given = CASES[name](p, ragged)
    return part.double(), given


def by_hand(part: nn.Module, given: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Run the module slice by slice in plain torch; join outputs and weight losses by targets."""
    pieces = list(zip(*(each.split(list(sizes)) for each in given), strict=True))
    outputs = [part(*piece) for piece in pieces]
    if outputs[0].dim():
        return torch.cat(outputs)
    if isinstance(part, SumTail):
        return torch.stack(outputs).sum()
    last = given[-1]
    counts = [
        len(piece[-1]) if isinstance(part, JointTail) else int((piece[-1] != -100).sum())
        for piece in pieces
    ]
    assert last.shape[0] == sum(sizes)
    total = sum(counts)
    losses = [loss * (n / total) for loss, n in zip(outputs, counts, strict=True) if n]
    return torch.stack(losses).sum()


def gradients(
    part: Callable[..., Any], module: nn.Module, given: Iterable[Any], factor: float = 3.0
) -> tuple[Any, list[Tensor | None]]:
    """Return the output and the gradients of arguments and parameters."""
    tensors = [each for _, each in tensor_leaves(list(given)) if each.requires_grad]
    leaves = [*tensors, *module.parameters()]
    for leaf in leaves:
        leaf.grad = None
    output = part(*given)
    loss = sum(
        each if each.dim() == 0 else each.square().sum()
        for _, each in tensor_leaves(output)
        if each.requires_grad
    )
    assert isinstance(loss, Tensor)
    (loss * factor).backward()
    return map_tensors(output, lambda leaf: leaf.detach()), [leaf.grad for leaf in leaves]


def same(found: Any, wanted: Any, *, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """Assert that outputs and gradients agree, including gradients that are None."""
    for one, other in zip(found[1], wanted[1], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    ones, others = tensor_leaves(found[0]), tensor_leaves(wanted[0])
    assert [path for path, _ in ones] == [path for path, _ in others]
    for (_, one), (_, other) in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def copy_of(part: nn.Module) -> Any:
    return copy.deepcopy(part)
