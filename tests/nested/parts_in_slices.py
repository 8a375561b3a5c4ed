"""Modules with their own microbatch size, and the same slices computed by hand."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro.batch.tensors import map_tensors, tensor_leaves

ROWS = 7


class Mlp(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(p), nn.Linear(16, 3))

    def forward(self, hidden):
        return self.layers(hidden)


class MlpTail(Mlp):
    reduction = "mean"

    def forward(self, hidden, targets):  # type: ignore[override]
        return F.cross_entropy(self.layers(hidden), targets, reduction=self.reduction)


class SumTail(MlpTail):
    reduction = "sum"


class JointTail(nn.Module):
    """The joint network of a transducer, in four dimensions, with one loss per row."""

    def __init__(self, p):
        super().__init__()
        self.out, self.dropout = nn.Linear(6, 5), nn.Dropout(p)

    def forward(self, times, labels, lengths):
        joint = self.dropout(torch.tanh(times[:, :, None] + labels[:, None]))
        scores = self.out(joint).log_softmax(-1)[..., 0]
        there = torch.arange(scores.shape[1]) < lengths[:, None]
        return (scores.sum(-1) * there).sum(1).neg().mean()


class TiedTail(nn.Module):
    """Use one weight twice, as embedding and head of a language model."""

    def __init__(self, p):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight, self.dropout = self.embedding.weight, nn.Dropout(p)

    def forward(self, tokens, hidden, labels):
        logits = self.head(self.dropout(hidden + self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def floats(*shape):
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


def targets(*shape, classes):
    found = torch.randint(classes, shape)
    found[1:3] = found.reshape(-1)[-1] = -100
    return found


CASES: dict[str, Any] = {
    "mlp": lambda p: (Mlp(p), (floats(ROWS, 6),)),
    "mlp tail": lambda p: (MlpTail(p), (floats(ROWS, 6), targets(ROWS, classes=3))),
    "sum tail": lambda p: (SumTail(p), (floats(ROWS, 6), targets(ROWS, classes=3))),
    "joint tail": lambda p: (
        JointTail(p),
        (floats(ROWS, 4, 6), floats(ROWS, 3, 6), torch.randint(1, 5, (ROWS,))),
    ),
    "tied tail": lambda p: (
        TiedTail(p),
        (torch.randint(11, (ROWS, 4)), floats(ROWS, 4, 6), targets(ROWS, 4, classes=11)),
    ),
}


def make_part(name, p=0.0) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(3)
    part, given = CASES[name](p)
    return part.double(), given


def by_hand(part, given, sizes):
    """Run the module slice by slice in plain torch; join outputs and weight losses by targets."""
    pieces = list(zip(*(each.split(list(sizes)) for each in given), strict=True))
    outputs = [part(*piece) for piece in pieces]
    if outputs[0].dim():
        return torch.cat(outputs)
    if isinstance(part, SumTail):
        return torch.stack(outputs).sum()
    per_row = isinstance(part, JointTail)
    counts = [len(last) if per_row else int((last != -100).sum()) for *_, last in pieces]
    losses = [loss * (n / sum(counts)) for loss, n in zip(outputs, counts, strict=True) if n]
    return torch.stack(losses).sum()


def gradients(part, module, given, factor=3.0) -> tuple[Any, list[Tensor | None]]:
    """Return the output and the gradients of arguments and parameters."""
    leaves = [*(each for _, each in tensor_leaves(list(given)) if each.requires_grad)]
    leaves += module.parameters()
    for leaf in leaves:
        leaf.grad = None
    output = part(*given)
    trained = [each for _, each in tensor_leaves(output) if each.requires_grad]
    loss: Any = sum(each.square().sum() if each.dim() else each for each in trained)
    (loss * factor).backward()
    return map_tensors(output, lambda leaf: leaf.detach()), [leaf.grad for leaf in leaves]


def same(found, wanted, *, rtol=1e-9, atol=1e-12):
    one, other = ([dict(tensor_leaves(each[0])), each[1]] for each in (found, wanted))
    torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def copy_of(part: nn.Module) -> Any:
    return copy.deepcopy(part)
