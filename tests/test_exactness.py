"""The gradient of microbatches is the whole batch's: any model, structure, loss, wiring and size.

The reference is always plain torch on the whole batch. Warnings are errors in the tests, so every
case here also shows that no false alarm is raised.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from automicro import BatchNormWarning, LossAverageWarning, Microbatcher
from tests.cases import (
    MODELS,
    STRUCTURES,
    Case,
    contrastive,
    difference,
    gradients,
    in_microbatches,
    pair_case,
    whole_batch,
)
from tests.loss.cases import LOSSES
from tests.models import (
    CLASSES,
    ROWS,
    VOCABULARY,
    Mlp,
    norm_model,
    token_targets,
    tokens,
    x,
    y,
)
from tests.sweeps import mostly_in_sweeps

SIZES = [1, 2, 3, 5, 7, 8, 20]
TABLES = {"model": MODELS, "batch": STRUCTURES, "loss": LOSSES}
CASES = {f"{t}: {name}": case for t, table in TABLES.items() for name, case in table.items()}

TINY_GPT2 = GPT2Config(  # type: ignore[call-arg]
    vocab_size=VOCABULARY,
    n_positions=8,
    n_embd=8,
    n_layer=1,
    n_head=2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
    loss_type="ForCausalLM",
)
TINY_BERT = BertConfig(  # type: ignore[call-arg]
    vocab_size=VOCABULARY,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=8,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=CLASSES,
    problem_type="single_label_classification",
)


def own_loss(model: nn.Module, batch: Any) -> Any:
    return model(**batch).loss


def causal_loss(model: nn.Module, batch: Any) -> Any:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def count_shifted(batch: Any) -> Any:
    return (batch["labels"][:, 1:] != -100).sum()


def text_batch() -> BatchEncoding:
    return BatchEncoding({"input_ids": tokens(), "labels": token_targets()})


def padded_batch() -> dict[str, Tensor]:
    attention = torch.arange(7) < torch.arange(ROWS)[:, None] % 6 + 2
    return {"input_ids": tokens(), "attention_mask": attention.long(), "labels": y()}


# transformers computes a loss in float32 whatever the model's dtype ("upcast to float if we need
# to"): six digits are all that its own loss has. With a loss of one's own there are all of them.
HUGGING_FACE = {
    "GPT-2": Case(
        model=lambda: GPT2LMHeadModel(TINY_GPT2).double(),
        batch=text_batch,
        loss=own_loss,
        tolerance=1e-6,
    ),
    "GPT-2, own loss": Case(
        model=lambda: GPT2LMHeadModel(TINY_GPT2).double(),
        batch=text_batch,
        loss=causal_loss,
        options={"forward": causal_loss, "loss_average": count_shifted},
    ),
    "BERT for masked tokens": Case(
        model=lambda: BertForMaskedLM(TINY_BERT).double(),
        batch=text_batch,
        loss=own_loss,
        tolerance=1e-6,
    ),
    "BERT for classes": Case(
        model=lambda: BertForSequenceClassification(TINY_BERT).double(),
        batch=padded_batch,
        loss=own_loss,
        tolerance=1e-6,
    ),
}
CASES.update({f"Hugging Face: {name}": case for name, case in HUGGING_FACE.items()})


# Each case row by row and at two of the other sizes; by `make sweeps` at all of them.
SOME_SIZES = [
    (name, size)
    for number, name in enumerate(CASES)
    for size in (1, *(SIZES[1 + (number + step) % 6] for step in (0, 3)))
]


@pytest.mark.parametrize(("name", "size"), mostly_in_sweeps(CASES, SIZES, quick=SOME_SIZES))
def test_the_gradient_and_the_loss_are_those_of_the_whole_batch(name: str, size: int) -> None:
    case = CASES[name]
    loss, expected = whole_batch(case)
    result, found = in_microbatches(case, size)
    assert difference(found, expected) < case.tolerance
    assert abs(float(result.loss) - loss) < case.tolerance
    assert result.num_samples == ROWS
    assert result.num_microbatches == -(-ROWS // size)
    assert result.microbatch_size == -(-ROWS // result.num_microbatches)
    assert (result.attempts, result.ooms) == (1, 0)


# Wirings: each job put together otherwise

Wiring = Callable[[Case, nn.Module, Any, int], None]


def overlapping_modules(case: Case, model: nn.Module, batch: Any, size: int) -> None:
    modules = [model, *model.children()]
    case.microbatcher(model, size, modules=modules).backward(batch)


class Owner(nn.Module):
    """A loss, or a forward, that has the model among its own modules."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *arguments: Any) -> Any:
        return self.call(*arguments)


def a_loss_that_owns_the_model(case: Case, model: nn.Module, batch: Any, size: int) -> None:
    (name,) = {"loss_fn", "forward"} & case.options.keys()
    call = case.options[name]
    if isinstance(call, nn.Module):  # what it averages over is still read off its class
        call = copy.deepcopy(call)
        call.add_module("owned", model)
    else:
        call = Owner(model, call)
    case.microbatcher(model, size, **{name: call}).backward(batch)


def two_calls_without_clearing(case: Case, model: nn.Module, batch: Any, size: int) -> None:
    microbatcher = case.microbatcher(model, size)
    microbatcher.backward(batch)
    microbatcher.backward(batch)


def two_microbatchers_by_turns(case: Case, model: nn.Module, batch: Any, size: int) -> None:
    one, other = case.microbatcher(model, size), case.microbatcher(model, size + 1)
    for microbatcher in (one, other, one):
        microbatcher.backward(batch)


WIRINGS: dict[str, tuple[Wiring, int]] = {  # and how often each trains on the batch
    "overlapping modules": (overlapping_modules, 1),
    "a loss that owns the model": (a_loss_that_owns_the_model, 1),
    "two calls without clearing": (two_calls_without_clearing, 2),
    "two Microbatchers by turns": (two_microbatchers_by_turns, 3),
}
# Whose loss is the model's, or is known by itself and not by what calls it.
CANNOT_OWN = {
    "model: Composer's interface",
    *(f"Hugging Face: {name}" for name in HUGGING_FACE),
    *(f"loss: {name}" for name in ("a function of torch", "a partial", "a partial sum")),
}


def gap_of(case: Case, wiring: Wiring, calls: int, size: int) -> float:
    torch.manual_seed(1)
    model = case.model()
    reference = copy.deepcopy(model)
    wiring(case, model, case.batch(), size)
    for _ in range(calls):
        case.loss(reference, case.batch()).backward()
    return difference(gradients(model), gradients(reference))


def wrong_in(name: str, jobs: list[tuple[str, int]]) -> dict[str, Any]:
    """The jobs, each with a size, whose gradients are others than plain torch's."""
    wiring, calls = WIRINGS[name]
    wrong: dict[str, Any] = {}
    for job, size in jobs:
        case = CASES[job]
        if wiring is a_loss_that_owns_the_model and job in CANNOT_OWN:
            continue
        try:
            gap = gap_of(case, wiring, calls, size)
        except Exception as error:
            wrong[f"{job}, {size}"] = error
        else:
            wrong |= {} if gap < calls * case.tolerance else {f"{job}, {size}": gap}
    return wrong


# Each job in a wiring, and each wiring at each size; by `make sweeps` each job in each wiring; the
# product of all by `make job`.
@pytest.mark.parametrize(
    "every", mostly_in_sweeps([True, False], quick=[False]), ids=["every job", "some jobs"]
)
@pytest.mark.parametrize("name", WIRINGS)
def test_jobs_are_exact_in_every_wiring(name: str, every: bool) -> None:
    sizes = [1, 3, 8]
    jobs = [(job, sizes[number % 3]) for number, job in enumerate(CASES)]
    some = jobs[list(WIRINGS).index(name) :: len(WIRINGS)]
    assert {size for _, size in some} == set(sizes)
    assert wrong_in(name, jobs if every else some) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", WIRINGS)
def test_every_job_is_exact_in_every_wiring_at_every_size(name: str) -> None:
    assert wrong_in(name, list(itertools.product(CASES, SIZES))) == {}


class Twice(nn.Module):
    """Takes two inputs that may be one tensor."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, one: Tensor, again: Tensor) -> Any:
        return self.net(0.3 * one + 0.7 * again)


def takes_numbers_in_pairs(case: Case) -> bool:
    batch = case.batch()
    return (
        "loss_fn" in case.options
        and isinstance(batch, tuple | list)
        and type(batch[0]) is Tensor
        and batch[0].is_floating_point()
        and batch[0].layout is torch.strided
    )


@pytest.mark.parametrize("size", mostly_in_sweeps([1, 3, 8], quick=[1]))
def test_one_leaf_twice_in_a_batch_gets_the_gradient_of_both(size: int) -> None:
    wrong: dict[str, float] = {}
    jobs = [job for job, case in CASES.items() if takes_numbers_in_pairs(case)]
    assert len(jobs) >= 20
    for job in jobs:
        case = CASES[job]
        found: list[dict[str, Any]] = []
        for whole in (True, False):
            torch.manual_seed(1)
            model, (leaf, targets) = Twice(case.model()), case.batch()
            leaf.requires_grad_()
            inputs = {"one": leaf, "again": leaf}
            if whole:
                case.options["loss_fn"](model(**inputs), targets).backward()
            else:
                case.microbatcher(model, size).backward((inputs, targets))
            found.append({**gradients(model), "leaf": leaf.grad})
        gap = difference(*found)
        wrong |= {} if gap < case.tolerance else {job: gap}
    assert wrong == {}


WITHOUT_EVALUATION_LOSS = {"batch: detection", "model: Composer's interface"}


@pytest.mark.parametrize("name", [name for name in CASES if name not in WITHOUT_EVALUATION_LOSS])
def test_the_loss_of_an_evaluation_is_the_whole_batchs(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    model, batch = case.model().eval(), case.batch()
    microbatcher = case.microbatcher(model, None, eval_microbatch_size=3)
    with torch.no_grad():
        expected = float(case.loss(model, batch))
    result = microbatcher.evaluate(batch)
    assert result.loss is not None
    assert abs(float(result.loss) - expected) < case.tolerance
    assert result.num_microbatches == 4


@pytest.mark.parametrize(
    "name", ["model: cnn with GroupNorm", "model: tied weights", "loss: class weights"]
)
def test_float32_gives_no_false_alarm_and_agrees_to_its_rounding(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    model = case.model().float()
    batch = tuple(t.float() if t.is_floating_point() else t for t in case.batch())
    options = dict(case.options)
    if isinstance(options.get("loss_fn"), nn.Module):
        options["loss_fn"] = options["loss_fn"].float()
    Microbatcher(model, microbatch_size=3, **options).backward(batch)
    found = gradients(model)
    model.zero_grad()
    options["loss_fn"](model(batch[0]), batch[1]).backward()
    assert difference(found, gradients(model)) < 1e-5
    if isinstance(options.get("loss_fn"), nn.Module):
        options["loss_fn"].double()


# Gradients that are there already


def none(model: nn.Module) -> None:
    model.zero_grad()


def zeros(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def random(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def bucket(model: nn.Module) -> None:
    """Gradients as views of one flat buffer, as with DDP's ``gradient_as_bucket_view``."""
    parameters = list(model.parameters())
    flat = torch.randn(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    pieces = flat.split([p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize("fill", [none, zeros, random, bucket])
@pytest.mark.parametrize("name", ["model: mlp", "model: tied weights"])
def test_existing_gradients_are_added_to_in_the_same_tensors(
    name: str, fill: Callable[[nn.Module], None], size: int
) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    model, batch = case.model(), case.batch()
    fill(model)
    reference = copy.deepcopy(model)  # without gradients
    for parameter, twin in zip(model.parameters(), reference.parameters(), strict=True):
        twin.grad = None if parameter.grad is None else parameter.grad.clone()
    case.loss(reference, batch).backward()
    tensors = [p.grad for p in model.parameters()]
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    case.microbatcher(model, size).backward(batch)
    assert difference(gradients(model), gradients(reference)) < 1e-9
    for parameter, tensor, address in zip(model.parameters(), tensors, addresses, strict=True):
        if tensor is not None:
            assert parameter.grad is tensor
            assert parameter.grad.data_ptr() == address


# What must not match, and is warned about


def test_batchnorm_in_training_mode_does_not_match_and_is_warned_about() -> None:
    case = pair_case(norm_model, lambda: (x(), y()), nn.CrossEntropyLoss())
    _, expected = whole_batch(case)
    with pytest.warns(BatchNormWarning, match=r"4 rows at a time instead of 11: 0\."):
        _, found = in_microbatches(case, 5)
    assert difference(found, expected) > 1e-4
    _, whole = in_microbatches(case, None)
    assert difference(whole, expected) < 1e-9


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum") * 2


@pytest.mark.parametrize("loss", [contrastive, summed])
def test_a_loss_that_is_no_mean_over_rows_does_not_match_and_is_warned_about(loss: Any) -> None:
    case = pair_case(Mlp, lambda: (x(), y()), loss)
    _, expected = whole_batch(case)
    with pytest.warns(LossAverageWarning, match="splitting changes this batch"):
        _, found = in_microbatches(case, 5)
    assert difference(found, expected) > 1e-3
    _, whole = in_microbatches(case, None)
    assert difference(whole, expected) < 1e-9
