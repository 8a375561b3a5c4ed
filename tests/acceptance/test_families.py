"""Model families: no verdict may be worse than in `families.md`."""

import collections
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from automicro import LossAverageWarning, Microbatcher
from automicro.features import with_features
from tests.acceptance.families import judges, known, place, without_dropout
from tests.acceptance.right import RIGHT
from tests.acceptance.rows import DTYPES, Draws
from tests.acceptance.torchmetrics_families import made
from tests.acceptance.transformers_families import TRANSFORMERS, UNSHIFTED
from tests.sweeps import SEED


def check(names: Iterable[str], capsys: pytest.CaptureFixture[Any]) -> None:
    before, all_judges = known(), judges()
    found = {name: all_judges[name]() for name in names}
    worse = {
        name: f"{before.get(name)} → {verdict}"
        for name, verdict in found.items()
        if place(verdict) > place(before.get(name, "exact"))
    }
    better = [name for name, verdict in found.items() if place(verdict) < place(before[name])]
    told = collections.Counter(
        f"{name.partition(' ')[0]} {verdict.partition(':')[0]}" for name, verdict in found.items()
    )
    with capsys.disabled():
        print("\n" + "\n".join(f"{count:4d} {each}" for each, count in sorted(told.items())))
        print(f"better than families.md, which is to be written anew: {better}" if better else "")
    assert worse == {}


def of(library: str) -> list[str]:
    return [name for name in judges() if name.startswith(library)]


@pytest.mark.sweep
def test_sampled_transformers_verdicts_are_no_worse(capsys: pytest.CaptureFixture[str]) -> None:
    check(of("transformers")[SEED % 12 :: 12], capsys)


@pytest.mark.sweep
def test_sampled_torchmetrics_verdicts_are_no_worse(capsys: pytest.CaptureFixture[str]) -> None:
    check(of("torchmetrics")[SEED % 4 :: 4], capsys)


# The last test installs its library temporarily, without dependencies.
@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("library", ["transformers", "torchmetrics", "torchvision"])
def test_verdicts_of_whole_library_are_no_worse(
    library: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check(of(library), capsys)


@pytest.mark.sweep
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kind", ["Accuracy", "AUROC", "ConfusionMatrix", "F1Score"])
def test_metrics_cause_no_warning_in_any_precision(kind: str, precision: str) -> None:
    """Warnings are errors here."""
    job = RIGHT["CrossEntropyLoss"].make(0, precision)
    metric = made(f"classification.Multiclass{kind}", {"num_classes": 3})()
    Microbatcher(job.model, eval_microbatch_size=8, **with_features(job.options)).evaluate(
        job.batch(0), metric
    )
    metric.compute()


def test_every_family_is_recorded_and_two_are_wrong() -> None:
    assert known().keys() == judges().keys()
    off = {name for name, verdict in known().items() if place(verdict) > place("refused")}
    assert off == {"transformers | Llama, dynamic rope", "transformers | Nyströmformer"}


@pytest.mark.sweep
@pytest.mark.parametrize("name", UNSHIFTED)
def test_wrong_declared_loss_type_causes_warning_with_remedy(name: str) -> None:
    family = TRANSFORMERS[name]
    torch.manual_seed(0)
    batch = family.batch(Draws(torch.Generator().manual_seed(1), torch.float32, 0))
    microbatcher = Microbatcher(without_dropout(family.model()), microbatch_size=family.size)
    with pytest.warns(LossAverageWarning) as told:
        microbatcher.backward(batch)
    assert "Run automicro.verify(model, batch, …) for the cause" in str(told[0].message)
    assert microbatcher.loss_average_is == "wrong"
