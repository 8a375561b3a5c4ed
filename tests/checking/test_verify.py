"""`automicro.verify` names injected causes, passes clean models and leaves no trace."""

import random
import re
from collections.abc import Callable
from typing import Any

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

LOSS = nn.CrossEntropyLoss()
HANDED_ON = {"loss_fn", "forward", "loss_average", "modules", "batch_layout"}


def single() -> Any:
    return x().float(), y()


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


# Several causes, sizes, notes


def test_each_of_several_causes_has_evidence() -> None:
    model = Layered(nn.BatchNorm1d(8), Annealed())
    report = verify(model, (x(), y()), loss_fn=summed)
    assert kinds(report) == ["batchnorm", "state", "loss average"]
    assert all(cause.evidence for cause in report.causes)
    assert report.loss_average == "'none'"
    assert report.verdict.startswith("not exact: BatchNorm averages")


def test_unproven_cause_is_only_noted() -> None:
    """The forward changes state, too, but only the loss causes the difference."""
    report = verify(Layered(Annealed(is_used=False)), (x(), y()), loss_fn=summed)
    assert kinds(report) == ["loss average"]
    assert [note.kind for note in report.notes] == ["state"]


def test_causes_are_found_in_float32() -> None:
    def squares(outputs: Tensor, targets: Tensor) -> Tensor:
        scores = outputs @ torch.ones(5, 1, dtype=torch.float32)  # rejects outputs in float64
        return (scores.square() * (targets[:, None] > 1)).sum() / (targets > 1).sum()

    report = verify(Layered(), single(), loss_fn=squares)
    assert report.dtype == "float32"
    assert "the model fails in float64" in report.notes[0].text
    assert kinds(report) == ["compares rows"]


def test_given_sizes_are_normalized() -> None:
    report = verify(Mlp(), (x(), y()), loss_fn=LOSS, sizes=[4, 5, 10, 99])
    shapes = [(each.num_microbatches, each.microbatch_size) for each in report.comparisons]
    assert shapes == [(2, 6), (3, 4)]


def test_default_sizes_are_limited_for_large_batch() -> None:
    batch = (torch.randn(500, 6, dtype=torch.float64), classes(500))
    report = verify(Mlp(), batch, loss_fn=LOSS)
    assert max(each.num_microbatches for each in report.comparisons) <= 32
    assert any(500 % each.num_microbatches for each in report.comparisons)


def test_batch_that_cannot_distinguish_averages_is_noted() -> None:
    even = (tokens(), classes(*tokens().shape, high=VOCABULARY))
    report = verify(Encoder(), even, loss_fn=over_tokens)
    assert report.exit_code == 0
    assert [note.kind for note in report.notes] == ["batch"]
    declared = verify(Encoder(), even, loss_fn=over_tokens, loss_average="tokens")
    assert not declared.notes


def test_loss_difference_without_gradient_is_only_noted() -> None:
    def forward(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + len(batch[0])

    report = verify(Mlp(), (x(), y()), forward=forward)
    assert report.exit_code == 0
    assert "loss value" in [note.kind for note in report.notes]


def test_uninitialized_lazy_model_is_reported() -> None:
    report = verify(nn.LazyLinear(3), (x(), y()), loss_fn=LOSS)
    assert kinds(report) == ["lazy"]
    assert "run one forward" in report.causes[0].remedy


def test_failure_at_one_size_differs_from_inexactness() -> None:
    def mean(model: nn.Module, batch: Any) -> Any:
        logits = model(batch[0]).squeeze()  # for a single row, no row dimension is left
        return F.cross_entropy(logits, batch[1]) + 0 * logits[:, 0].sum()

    report = verify(Mlp(), (x(), y()), forward=mean, sizes=[6, 1])
    assert kinds(report) == ["fails on fewer rows"]
    assert "fails with microbatches of at most 1 row(s): " in report.verdict
    assert ".squeeze() without a dimension" in report.causes[0].remedy
    assert "relative error" not in report.verdict

    def total(model: nn.Module, batch: Any) -> Any:
        return mean(model, batch) * len(batch[0])

    report = verify(Mlp(), (x(), y()), forward=total, sizes=[6, 1])
    assert kinds(report) == ["fails on fewer rows", "loss average"]
    assert report.loss_average == "'none'"


def test_batchnorm_is_named_when_no_size_runs() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    report = verify(model, (x()[:2], y()[:2]), loss_fn=LOSS)
    assert kinds(report) == ["batchnorm"]


# The report


def test_report_text_has_verdict_advice_and_errors() -> None:
    report = verify(Layered(nn.BatchNorm1d(8)), (x(), y()), loss_fn=LOSS)
    text = str(report)
    assert text.splitlines()[0] == report.verdict
    assert "What to do: use GroupNorm" in text
    assert re.search(
        r"2 × 6 rows: 0?[0-9.e+-]+ of the gradient of [a-z.]+, [0-9.e-]+ of the loss", text
    )


def test_comparisons_name_worst_parameter() -> None:
    def forward(model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss + len(batch[0]) * model.last.bias.sum()  # type: ignore[operator, union-attr]

    report = verify(Layered(), (x(), y()), forward=forward)
    assert {each.worst for each in report.comparisons} == {"last.bias"}
    assert kinds(report) == ["compares rows"]


# Misuse


def test_unreduced_loss_raises_loss_error() -> None:
    with pytest.raises(LossError, match="must be a single number"):
        verify(Mlp(), (x(), y()), loss_fn=nn.CrossEntropyLoss(reduction="none"))


def test_sliced_parts_are_noted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    part = split(model[0], microbatch_size=2)
    batch = torch.randn(6, 4).double(), torch.randint(3, (6,))
    report = verify(model, batch, loss_fn=nn.CrossEntropyLoss())
    assert report.exit_code == 0
    assert [(each.kind, each.names) for each in report.notes] == [("parts", ("0",))]
    part.remove()
    assert not verify(model, batch, loss_fn=nn.CrossEntropyLoss()).notes


def test_model_exception_propagates() -> None:
    def forward(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("mask")

    with pytest.raises(KeyError, match="mask"):
        verify(Mlp(), (x(), y()), forward=forward)


def test_unverifiable_batch_gives_verdict_with_remedy() -> None:
    for batch, remedy in (
        ((x(), y(), torch.ones(1, 4)), "batch_layout="),
        ((x()[:1], y()[:1]), "a dozen or more"),
        ((x(), torch.full_like(y(), -100)), "targets that are not ignored"),
    ):
        report = verify(Mlp(), batch, forward=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
        assert kinds(report) == ["batch"]
        assert report.exit_code == 3
        assert report.status == "cannot be verified"
        assert remedy in str(report)


def test_unreachable_state_is_reported_as_nondeterministic() -> None:
    outside = Outside(calls=0)

    def forward(model: nn.Module, batch: Any) -> Any:
        outside.calls += 1
        return F.cross_entropy(model(batch[0]), batch[1]) * outside.calls

    report = verify(Mlp(), (x(), y()), forward=forward)
    assert kinds(report) == ["non-deterministic"]
    assert report.exit_code == 3


def test_eval_mode_is_noted() -> None:
    report = verify(Layered(nn.BatchNorm1d(8)).eval(), (x(), y()), loss_fn=LOSS)
    assert report.is_exact
    assert [note.kind for note in report.notes] == ["mode"]


# Side effects


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


def with_loss_fn(model: nn.Module) -> dict[str, Any]:
    return {"loss_fn": LOSS}


def with_captured_model(model: nn.Module) -> dict[str, Any]:
    return {"forward": lambda _, batch: F.cross_entropy(model(batch[0]), batch[1])}


@pytest.mark.parametrize("options", [with_loss_fn, with_captured_model])
def test_verify_restores_model_batch_gradients_and_generators(
    options: Callable[[nn.Module], dict[str, Any]],
) -> None:
    model, batch = Everything(), single()
    model.norm.eval()
    LOSS(model(batch[0].clone()), batch[1]).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    values = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    history, mean = list(model.history), model.mean["of"].clone()
    modes = [module.training for module in model.modules()]
    generators = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    own = repr(model.generator.bit_generator.state)
    steps, seed = model.annealed.steps, torch.get_rng_state()
    inputs = batch[0].clone()

    report = verify(model, batch, **options(model))

    assert report.causes
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert all(torch.equal(gradients[name], value) for name, value in values.items())  # type: ignore[arg-type]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.history == history
    assert model.mean.keys() == {"of", "also"}
    assert torch.equal(model.mean["of"], mean)
    assert model.annealed.steps == steps
    assert [module.training for module in model.modules()] == modes
    assert random.getstate() == generators[0]
    assert np.random.get_state()[1].tolist() == generators[1]  # type: ignore[index]
    assert repr(model.generator.bit_generator.state) == own
    assert torch.equal(torch.get_rng_state(), seed)
    assert torch.equal(batch[0], inputs)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_state_is_restored_when_model_fails() -> None:
    model = Layered(Annealed())

    def forward(_: nn.Module, batch: Any) -> Tensor:
        model(batch[0])
        raise KeyError("mask")

    with pytest.raises(KeyError):
        verify(model, single(), forward=forward)
    assert model.middle[0].steps == 0
    assert torch.get_default_dtype() is torch.float32


def test_verify_works_under_no_grad() -> None:
    with torch.no_grad():
        assert verify(Mlp(), (x(), y()), loss_fn=LOSS).is_exact


# Helpers


def test_modules_captured_by_functions_are_found() -> None:
    teacher = nn.Linear(2, 2)

    def inner(batch: Any) -> Any:
        return teacher(batch)

    def outer(model: Any, batch: Any, extra: Any = (teacher,)) -> Any:
        return model(batch)

    assert captured_modules(lambda model, batch: inner(batch)) == [teacher]
    assert captured_modules(outer) == [teacher]
    assert captured_modules(lambda model, batch: model(batch)) == []
    assert captured_modules(F.cross_entropy) == []


def test_gradient_at_rounding_level_is_ignored() -> None:
    whole = Reading(gradients={"w": torch.tensor([1.0]), "b": torch.tensor([1e-17])})
    split = Reading(gradients={"w": torch.tensor([1.0]), "b": torch.tensor([-1e-17])})
    assert max(relative_errors(split, whole).values()) < 1e-14
    assert relative_errors(Reading(), whole)["w"] == 1.0
