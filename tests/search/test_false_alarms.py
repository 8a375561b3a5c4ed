"""What is exact is not warned about: families of models, losses, layers, four precisions."""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from automicro import Microbatcher
from automicro.errors import AutomicroWarning
from tests.search.exact_jobs import CLASSES, LAYERS, LOSSES, ExactJob, in_precision
from tests.search.exact_transformers import TRANSFORMERS, UNSHIFTED
from tests.search.oracle import relative_error

pytestmark = pytest.mark.sweep

JOBS = {**LOSSES, **LAYERS, **TRANSFORMERS}
PRECISIONS = {
    "float64": (torch.float64, "fp32"),
    "float32": (torch.float32, "fp32"),
    "bf16": (torch.bfloat16, "fp32"),
    "autocast": (torch.float32, "bf16"),
}
BATCHES = 3
SIZES = (3, 1)

METRICS: dict[str, Callable[[], Any]] = {
    "accuracy": lambda: MulticlassAccuracy(CLASSES),
    "AUROC": lambda: MulticlassAUROC(CLASSES),
    "confusion": lambda: MulticlassConfusionMatrix(CLASSES),
    "collection": lambda: MetricCollection(
        [MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)]
    ),
}


def make(job: ExactJob, precision: str) -> tuple[nn.Module, list[Any], dict[str, Any]]:
    dtype, autocast = PRECISIONS[precision]
    torch.manual_seed(0)
    model = job.model().to(dtype)
    draws = torch.Generator().manual_seed(1)
    batches = [in_precision(job.batch(draws), dtype) for _ in range(BATCHES)]
    options = dict(job.options)
    if isinstance(options.get("loss_fn"), nn.Module):
        options["loss_fn"] = copy.deepcopy(options["loss_fn"]).to(dtype)
    if autocast != "fp32":
        options["precision"] = autocast
    return model, batches, options


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What automicro says, in words; other people's warnings are theirs."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(w.message) for w in caught if issubclass(w.category, AutomicroWarning)]


def whole(model: Any, batch: Any, options: dict[str, Any]) -> Any:
    if "loss_fn" in options:
        return options["loss_fn"](model(batch[0]), batch[1])
    if "forward" in options:
        result = options["forward"](model, batch)
        return sum(result.values()) if isinstance(result, dict) else result
    return model(**batch).loss


CASES = [
    (name, precision)
    for name, job in JOBS.items()
    for precision in PRECISIONS
    if precision not in job.lacks
]


@functools.cache
def has_lstm_in_bf16() -> bool:
    """Whether oneDNN has one for this processor: under autocast torch asks for no other."""
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def kernels_that_are_there() -> Iterator[None]:
    """Torch's own in place of oneDNN's, where that lacks some."""
    if has_lstm_in_bf16():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration", category=UserWarning)
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def trained_without_a_word(name: str, precision: str) -> None:
    with kernels_that_are_there() if precision == "autocast" else contextlib.nullcontext():
        train_without_a_word(name, precision)


def train_without_a_word(name: str, precision: str) -> None:
    model, batches, options = make(JOBS[name], precision)
    for size in SIZES:
        microbatcher = Microbatcher(model, microbatch_size=size, **options)
        with heard() as said:
            for batch in batches:
                microbatcher.backward(batch)
        assert said == []


# Each job in one precision always, and in all of them by `make search`.
@pytest.mark.parametrize(("name", "precision"), CASES[::3])
def test_an_exact_job_is_trained_without_a_word(name: str, precision: str) -> None:
    trained_without_a_word(name, precision)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), CASES)
def test_exact_jobs_are_trained_without_a_word_in_any_precision(name: str, precision: str) -> None:
    trained_without_a_word(name, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("metric", METRICS)
def test_an_exact_job_is_evaluated_without_a_word(metric: str, precision: str) -> None:
    model, batches, options = make(LOSSES["CrossEntropyLoss ignored"], precision)
    batches = [(inputs, targets.clamp(min=0)) for inputs, targets in batches]
    counted = METRICS[metric]()
    microbatcher = Microbatcher(model, eval_microbatch_size=3, **options)
    with heard() as said:
        for batch in batches:
            microbatcher.evaluate(batch, counted)
        counted.compute()
    assert said == []


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if not job.draws])
def test_these_jobs_are_exact(name: str) -> None:
    """Or else silence about them would be no virtue."""
    job = JOBS[name]
    model, batches, options = make(job, "float64")
    for size in SIZES:
        model.zero_grad()
        Microbatcher(model, microbatch_size=size, probe=False, **options).backward(batches[0])
        ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole(model, batches[0], options).backward()
        theirs = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        assert relative_error(ours, theirs) < max(job.tolerance, 1e-9) * 100


def test_there_are_enough_exact_jobs() -> None:
    """And each of them is tried in a sample, and each precision."""
    assert len(JOBS) >= 60
    assert {name for name, _ in CASES[::3]} == set(JOBS)
    assert {precision for _, precision in CASES[::3]} == set(PRECISIONS)


@pytest.mark.parametrize("name", UNSHIFTED)
def test_a_model_whose_loss_is_not_of_its_declared_type_is_named_with_the_remedy(name: str) -> None:
    torch.manual_seed(0)
    batch = in_precision(UNSHIFTED[name].batch(torch.Generator().manual_seed(1)), torch.float64)
    microbatcher = Microbatcher(UNSHIFTED[name].model().double(), microbatch_size=3)
    with heard() as said:
        microbatcher.backward(batch)
    assert said[0].endswith("pass loss_average=lambda batch: (batch['labels'] != -100).sum()")
    assert microbatcher.loss_average_is == "wrong"
