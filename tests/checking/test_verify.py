"""`automicro.verify` names injected causes, passes clean models and leaves no trace."""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from automicro import LossError, VerifyReport, split, verify
from automicro.checking.reading import Reading, relative_errors
from automicro.reach import captured_modules
from tests.acceptance.checks import TABLE
from tests.models import VOCABULARY, Encoder, Mlp, classes, tokens, x, y
from tests.oracle.drawing import alone
from tests.oracle.forms import FORMS
from tests.oracle.jobs import Job
from tests.outside import Outside
from tests.sweeps import mostly_in_sweeps
from tests.torture.engine.subject import freeze

LOSS = nn.CrossEntropyLoss()
HANDED_ON = {"loss_fn", "forward", "loss_average", "modules", "batch_layout"}


def kinds(report: VerifyReport) -> list[str]:
    return [cause.kind for cause in report.causes]


def verified(row: str) -> VerifyReport:
    """Verify an entry of the table of checks."""
    job = TABLE[row].make(0, "float64")
    options = {name: value for name, value in job.options.items() if name in HANDED_ON}
    return verify(job.model, job.batch(1), sizes=[16, 5], **options)


# Entry of the table of checks: kind and name of the cause, and the right average.
NAMED = {
    "batch normalisation": ("batchnorm", "1", ""),
    "pixels that count": ("loss average", "255", "lambda batch: (batch[1] != 255).sum()"),
    "a mask": ("loss average", "keep", "lambda batch: batch['keep'].sum()"),
    "tokens and rows by name": (
        "loss average",
        "language",
        "{'language': 'tokens', 'size': 'samples'}",
    ),
    "loss: InfoNCE": ("compares rows", "forward", ""),
    "centred": ("across rows", "Between", ""),
    "a weight by the number of calls": ("state", "calls", ""),
    "spectral norms": ("state", "_u", ""),
    "moves a teacher": ("state", "teacher.weight", ""),
    "sets the seed of all": ("random", "dropout", ""),
    "NumPy's noise": ("random", "NumPy", ""),
    "model: NumPy's generator": ("random", "a generator of your own", ""),
}
# Entry: kind of a note.
EXACT = {
    "model: BERT": "",
    "model: GPT-2 with dropout": "random",
    "model: layer drop": "random",
    "BatchNorm that is frozen": "",
    "CrossEntropyLoss, weights": "",
    "a teacher in a closure": "",
    "rows counted, and what came last": "state",
    "noise of a distribution": "random",
}


@pytest.mark.parametrize("row", NAMED)
def test_injected_cause_is_named(row: str) -> None:
    kind, name, loss_average = NAMED[row]
    report = verified(row)
    (cause,) = report.causes
    assert cause.kind == kind, report
    assert any(name in each for each in cause.names), report
    assert cause.remedy
    assert report.exit_code == (3 if "held constant, from" in cause.text else 1)
    assert report.loss_average == loss_average
    if loss_average:
        assert report.verdict.startswith(f"exact with loss_average={loss_average} ")
    assert ("automicro.Contrastive" in cause.remedy) is (kind == "compares rows")


@pytest.mark.parametrize("row", EXACT)
def test_exact_models_pass(row: str) -> None:
    report = verified(row)
    assert report.is_exact, report
    assert report.exit_code == 0
    assert report.dtype == "float64"
    assert report.verdict.startswith("exact: splitting does not change the gradient")
    assert not report.causes
    assert not EXACT[row] or EXACT[row] in [note.kind for note in report.notes], report


@pytest.mark.parametrize(
    "form",
    mostly_in_sweeps(
        [name for name, form in FORMS.items() if not form.edits],
        quick=["nested", "list of samples", "texts", "jagged", "rows in dimension 1"],
    ),
)
def test_every_batch_form_is_verified_as_exact(form: str) -> None:
    job = Job(alone("form", form))
    options = {name: value for name, value in job.options.items() if name in HANDED_ON}
    report = verify(job.model, job.make_batch(job.contents[0], 0), **options)
    assert report.exit_code == 0, report


class Layered(nn.Module):
    """Apply given layers between two linear ones."""

    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(6, 8), nn.Sequential(*middle)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.middle(self.first(x))))


class Annealed(nn.Module):
    """Count forwards in a plain attribute, and optionally use the count."""

    def __init__(self, *, is_used: bool = True) -> None:
        super().__init__()
        self.steps, self.is_used = 0, is_used
        self.last_seen: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        self.last_seen = x.detach()
        return x / self.steps if self.is_used else x


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum")


def over_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def plain(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def by_rows(model: Any, batch: Any) -> Any:
    return plain(model, batch) + len(batch[0]) * model.last.bias.sum()


def by_calls() -> Callable[..., Any]:
    outside = Outside(calls=0)

    def forward(model: nn.Module, batch: Any) -> Any:
        outside.calls += 1
        return plain(model, batch) * outside.calls

    return forward


def single_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    scores = outputs @ torch.ones(5, 1, dtype=torch.float32)  # rejects outputs in float64
    return (scores.square() * (targets[:, None] > 1)).sum() / (targets > 1).sum()


def squeezed(model: Any, batch: Any) -> Any:
    logits = model(batch[0]).squeeze()  # for a single row, no row dimension is left
    return F.cross_entropy(logits, batch[1]) + 0 * logits[:, 0].sum()


def even() -> Any:
    return tokens(), classes(*tokens().shape, high=VOCABULARY)


class Case(NamedTuple):
    """What to verify; the kinds of causes and notes, and text of the report."""

    model: Callable[[], Any]
    options: dict[str, Any]
    causes: Sequence[str] = ()
    notes: Sequence[str] = ()
    said: str = ""
    batch: Callable[[], Any] = lambda: (x(), y())


def averaging(model: Any, batch: Any) -> Tensor:
    return plain(model, batch) + len(batch[0])


def squeezed_total(model: Any, batch: Any) -> Any:
    return squeezed(model, batch) * len(batch[0])


TOKENS = {"loss_fn": over_tokens}
CASES = {
    "several causes": Case(
        lambda: Layered(nn.BatchNorm1d(8), Annealed()),
        {"loss_fn": summed},
        ["batchnorm", "state", "loss average"],
        said="^not exact: BatchNorm averages.*The average of the loss: wrong",
    ),
    "batchnorm": Case(
        lambda: Layered(nn.BatchNorm1d(8)),
        {"loss_fn": LOSS},
        ["batchnorm"],
        said="What to do: use GroupNorm.*2 × 6 rows: 0?[0-9.e+-]+ of the gradient of [a-z.]+, "
        "[0-9.e-]+ of the loss",
    ),
    "a cause that is not proven": Case(
        lambda: Layered(Annealed(is_used=False)), {"loss_fn": summed}, ["loss average"], ["state"]
    ),
    "fails in float64": Case(
        Layered,
        {"loss_fn": single_squares},
        ["compares rows"],
        ["dtype"],
        "the model fails in float64",
        lambda: (x().float(), y()),
    ),
    "equal averages": Case(Encoder, TOKENS, [], ["batch"], batch=even),
    "a declared average": Case(Encoder, {**TOKENS, "loss_average": "tokens"}, batch=even),
    "only the value of the loss": Case(Mlp, {"forward": averaging}, [], ["loss value"]),
    "lazy": Case(lambda: nn.LazyLinear(3), {"loss_fn": LOSS}, ["lazy"], said="run one forward"),
    "batchnorm where no size runs": Case(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)),
        {"loss_fn": LOSS},
        ["batchnorm"],
        batch=lambda: (x()[:2], y()[:2]),
    ),
    "eval mode": Case(lambda: Layered(nn.BatchNorm1d(8)).eval(), {"loss_fn": LOSS}, [], ["mode"]),
    "what is out of reach": Case(
        Mlp, {"forward": by_calls()}, ["non-deterministic"], said="^cannot be verified"
    ),
    "the worst parameter": Case(
        Layered, {"forward": by_rows}, ["compares rows"], said="of the gradient of last.bias, "
    ),
    "one size fails": Case(
        Mlp,
        {"forward": squeezed, "sizes": [6, 1]},
        ["fails on fewer rows"],
        said=r"with microbatches of at most 1 row\(s\): .*\.squeeze\(\) without a dimension",
    ),
    "one size fails, the other is off": Case(
        Mlp,
        {"forward": squeezed_total, "sizes": [6, 1]},
        ["fails on fewer rows", "loss average"],
        said="loss_average='none'",
    ),
    "no layout": Case(
        Mlp,
        {"forward": plain},
        ["batch"],
        said="batch_layout=",
        batch=lambda: (x(), y(), torch.ones(1, 4)),
    ),
    "one row": Case(
        Mlp,
        {"forward": plain},
        ["batch"],
        said="a dozen or more",
        batch=lambda: (x()[:1], y()[:1]),
    ),
    "ignored targets only": Case(
        Mlp,
        {"forward": plain},
        ["batch"],
        said="targets that are not ignored",
        batch=lambda: (x(), torch.full_like(y(), -100)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_report_names_causes_and_notes(name: str) -> None:
    model, options, causes, notes, said, batch = CASES[name]
    report = verify(model(), batch(), **options)
    assert kinds(report) == [*causes], report
    assert [note.kind for note in report.notes] == [*notes], report
    is_unverified = not {"batch", "lazy", "non-deterministic"}.isdisjoint(causes)
    assert report.exit_code == (3 if is_unverified else 1 if causes else 0)
    assert name != "several causes" or all(cause.evidence for cause in report.causes)
    assert re.search(said, str(report), re.S), report
    assert str(report).splitlines()[0] == report.verdict


def test_sizes_are_normalized_and_limited() -> None:
    report = verify(Mlp(), (x(), y()), loss_fn=LOSS, sizes=[4, 5, 10, 99])
    shapes = [(each.num_microbatches, each.microbatch_size) for each in report.comparisons]
    assert shapes == [(2, 6), (3, 4)]
    batch = (torch.randn(500, 6, dtype=torch.float64), classes(500))
    counts = [each.num_microbatches for each in verify(Mlp(), batch, loss_fn=LOSS).comparisons]
    assert max(counts) <= 32
    assert any(500 % count for count in counts)


def test_sliced_parts_are_noted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    part = split(model[0], microbatch_size=2)
    batch = torch.randn(6, 4).double(), torch.randint(3, (6,))
    report = verify(model, batch, loss_fn=nn.CrossEntropyLoss())
    assert report.exit_code == 0
    assert [(each.kind, each.names) for each in report.notes] == [("parts", ("0",))]
    part.remove()
    assert not verify(model, batch, loss_fn=nn.CrossEntropyLoss()).notes


class Everything(nn.Module):
    """Change every kind of state in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.spectral = spectral_norm(nn.Linear(6, 8))
        self.annealed = Annealed()
        self.last = nn.Linear(8, 5)
        self.history: list[int] = [7]
        self.mean = {"of": torch.zeros(8)}
        self.generator = np.random.default_rng(1)

    def forward(self, x: Tensor) -> Any:
        self.history.append(len(x))
        x = x.mul_(0.5) * random.random() + float(np.random.random() + self.generator.random())
        hidden = F.dropout(self.annealed(self.spectral(self.norm(x))), 0.3)
        self.mean["of"].add_(hidden.detach().mean(0).to(torch.float32))
        self.mean["also"] = hidden.detach()
        return self.last(hidden)


def trace(model: nn.Module, batch: Any) -> Any:
    """Return everything that a check could change."""
    modules = [vars(module) for module in model.modules()]
    gradients = [(id(p.grad), p.grad) for p in model.parameters()]
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    return torch.get_default_dtype(), freeze([modules, gradients, generators, batch])


@pytest.mark.parametrize("is_captured", [False, True])
def test_verify_leaves_no_trace(is_captured: bool) -> None:
    model, batch = Everything(), (x().float(), y())
    model.norm.eval()
    LOSS(model(batch[0].clone()), batch[1]).backward()
    before = trace(model, batch)
    own = {"forward": lambda _, b: LOSS(model(b[0]), b[1])} if is_captured else {"loss_fn": LOSS}
    assert verify(model, batch, **own).causes
    assert trace(model, batch) == before

    def failing(_: nn.Module, batch: Any) -> Tensor:
        model(batch[0])
        raise KeyError("mask")

    with pytest.raises(KeyError, match="mask"):
        verify(model, batch, forward=failing)
    assert trace(model, batch) == before


def test_verify_works_under_no_grad_and_rejects_unreduced_losses() -> None:
    with torch.no_grad():
        assert verify(Mlp(), (x(), y()), loss_fn=LOSS).is_exact
    with pytest.raises(LossError, match="must be a single number"):
        verify(Mlp(), (x(), y()), loss_fn=nn.CrossEntropyLoss(reduction="none"))


def test_modules_captured_by_functions_are_found() -> None:
    teacher = nn.Linear(2, 2)

    def inner(batch: Any) -> Any:
        return teacher(batch)

    def outer(model: Any, batch: Any, extra: Any = (teacher,)) -> Any:
        return model(batch)

    assert captured_modules(lambda model, batch: inner(batch)) == [teacher]
    assert captured_modules(outer) == [teacher]
    assert captured_modules(lambda model, batch: model(batch)) == []


def test_gradient_at_rounding_level_is_ignored() -> None:
    whole = Reading(gradients={"w": torch.tensor([1.0]), "b": torch.tensor([1e-17])})
    split = Reading(gradients={"w": torch.tensor([1.0]), "b": torch.tensor([-1e-17])})
    assert max(relative_errors(split, whole).values()) < 1e-14
    assert relative_errors(Reading(), whole)["w"] == 1.0


def test_batchnorm_is_named_although_a_mask_is_compared_with_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    draws = torch.Generator().manual_seed(0)
    batch = torch.randn(12, 8, generator=draws), (torch.arange(12) % 3 > 0).float()

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        inputs, mask = batch
        return (model(inputs)[:, 0].square() * (mask == 1)).mean()

    assert kinds(verify(model, batch, forward=forward, loss_average="samples")) == ["batchnorm"]
