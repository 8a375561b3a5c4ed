"""Rows of varying length are sorted, packed by cost and trimmed without changing results."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from automicro import BatchError, Microbatcher, PaddingWarning, SampleTooLargeError, StepResult
from automicro.features import MicrobatchUnit, UpdateMetric, with_features
from tests.cases import difference, gradients
from tests.step.texts import IGNORED, Listener, Reader, sounds, texts, transcribe

LENGTHS = [9, 3, 17, 5, 5, 12, 2, 8, 16, 4, 7]
TOKENS = MicrobatchUnit("tokens")


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the training forward changes attributes.*: seen")
        yield


def whole(model, loss):
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return found


def in_tokens(model: nn.Module, size: Any = 60, unit: Any = TOKENS, **options: Any) -> Microbatcher:
    given = {"loss_average": "tokens", "features": [unit], **options}
    return Microbatcher(model, microbatch_size=size, **given)


def exact(microbatcher: Microbatcher, model, batch, loss: Any = None, **options: Any) -> StepResult:
    """Train on a batch and compare its gradient with that of plain torch."""
    model.zero_grad()
    expected = whole(model, model(**batch)["loss"] if loss is None else loss)
    result = microbatcher.backward(batch, **options)
    assert difference(gradients(model), expected) < 1e-9
    return result


SIZES: list[Any] = [1, 20, 64, None, "auto"]


@pytest.mark.parametrize(
    ("size", "left"), [*((size, False) for size in SIZES), (17, True), (40, True)]
)
def test_texts_match_gradient_of_whole_batch(size, left):
    model, batch = Reader(), texts(LENGTHS, padded=21, left=left)
    plain = model(**batch)
    result = exact(in_tokens(model, size), model, batch, return_outputs=True)
    assert float(result.loss) == pytest.approx(float(plain["loss"].detach()), abs=1e-12)
    assert (result.microbatch_unit, result.num_samples) == ("tokens", len(LENGTHS))
    ran = model.seen[-result.num_microbatches :]
    assert sum(rows for rows, _ in ran) == len(LENGTHS)
    assert result.microbatch_size == max(rows * length for rows, length in ran)
    assert all(length <= 17 for _, length in ran), "padding was computed that no row needs"
    if isinstance(size, int):
        assert all(rows * length <= size or rows == 1 for rows, length in ran)
    # Outputs match those of the whole batch, in its order and with its padding.
    real = batch["attention_mask"].bool()
    assert result.outputs["logits"].shape == plain["logits"].shape
    assert torch.allclose(result.outputs["logits"][real], plain["logits"][real], atol=1e-12)
    assert torch.allclose(result.outputs["pooled"], plain["pooled"], atol=1e-12)


COST = MicrobatchUnit(lambda row: (int(row["audio_lengths"]), int(row["label_lengths"])))


@pytest.mark.parametrize(
    ("size", "unit", "lengths"),
    [
        (1, COST, LENGTHS),
        (30, COST, LENGTHS),
        ("auto", COST, LENGTHS),
        (30, TOKENS, [16, 3, 9, 5, 12, 2, 8, 7]),  # as many labels in a row as rows
    ],
)
def test_sounds_with_lengths_match_gradient_of_whole_batch(size, unit, lengths):
    model, batch, seen = Listener(), sounds(lengths), list[Any]()
    loss, outputs = transcribe(model, batch)
    microbatcher = in_tokens(model, size, unit, forward=transcribe, loss_average="samples")
    model.register_forward_pre_hook(lambda _, given: seen.append((*given[0].shape[:2],)))
    result = exact(microbatcher, model, batch, loss, return_outputs=True)
    assert torch.allclose(result.outputs, outputs, atol=1e-12)
    if unit is COST:  # frames times letters, each of the longest row of a slice
        assert result.microbatch_unit == "units of cost"
        ran = seen[-result.num_microbatches :]
        assert result.microbatch_size >= max(rows * frames for rows, frames in ran)
        assert len({frames for _, frames in ran}) > 1


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tuple_batch_with_padding_matches_gradient_of_whole_batch(reduction):
    model, given = nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 23)).double(), texts(LENGTHS)
    batch = (given["input_ids"], given["labels"], given["attention_mask"])

    def forward(model, batch):
        logits, targets = model(batch[0]).flatten(0, 1), batch[1].flatten()
        return nn.functional.cross_entropy(logits, targets, reduction=reduction)

    microbatcher = in_tokens(
        model,
        30,
        MicrobatchUnit("tokens", padding={"0": "2", "1": "2"}),
        forward=forward,
        loss_average="none" if reduction == "sum" else lambda each: (each[1] != IGNORED).sum(),
    )
    exact(microbatcher, model, batch, forward(model, batch))


def test_accumulated_batches_match_gradient_of_combined_loss():
    model, batches = Reader(), [texts(LENGTHS, padded=30), texts([4, 30, 6])]
    counts = [int((each["labels"] != IGNORED).sum()) for each in batches]
    losses = [n * model(**each)["loss"] for n, each in zip(counts, batches, strict=True)]
    expected = whole(model, torch.stack(losses).sum() / sum(counts))
    result = in_tokens(model, 40).accumulate(batches, return_outputs=True)
    assert difference(gradients(model), expected) < 1e-9
    assert result.outputs["pooled"].shape == (14, 8)


def test_evaluation_prediction_and_metrics_keep_row_order():
    model, batch = Reader(dropout=0.5), texts(LENGTHS)
    plain, real = model.eval()(**batch), batch["attention_mask"].bool()
    metric, update = torchmetrics.CatMetric(), lambda m, out, _: m.update(out["pooled"].sum(-1))
    microbatcher = Microbatcher(
        model.train(),
        eval_microbatch_size=24,
        features=[TOKENS, UpdateMetric(update)],
        loss_average="tokens",
    )
    result: Any = microbatcher.evaluate(batch, metric, return_outputs=True)
    assert result.num_microbatches > 1
    assert float(result.loss) == pytest.approx(float(plain["loss"].detach()))
    assert torch.allclose(metric.compute().double(), plain["pooled"].sum(-1), atol=1e-5)
    del batch["labels"]
    for outputs in (result.outputs, microbatcher.predict(batch)):
        assert torch.allclose(outputs["logits"][real], plain["logits"][real])
        assert torch.allclose(outputs["pooled"], plain["pooled"])


# Padding


class Shifting(Reader):
    """Its labels are its words, and each is predicted from the words before it."""

    def forward(self, *ids: Any, labels: Any = None, **given: Any) -> Any:
        following = labels.roll(-1, 1)
        following[:, -1] = IGNORED
        return super().forward(*ids, labels=following, **given)  # type: ignore[misc]


class Pooling(nn.Module):
    """Classify each row by the mean over its words, or over its words and padding."""

    def __init__(self, *, sees_padding):
        super().__init__()
        self.embed, self.head = nn.Embedding(23, 8), nn.Linear(8, 3)
        self.sees_padding = sees_padding
        self.double()

    def forward(self, input_ids, attention_mask, labels):
        mask = attention_mask[..., None].double()
        count = mask.shape[1] if self.sees_padding else mask.sum(1).clamp(min=1)
        logits = self.head((self.embed(input_ids) * mask).sum(1) / count)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def shifted(*, counts):
    """Return left-padded texts; without padding, the shortest text would have no loss."""
    batch = texts([*LENGTHS, 1], padded=20, left=True)
    mask = batch["attention_mask"]
    batch["labels"] = torch.where(mask == 1, batch["input_ids"], IGNORED)
    if not counts:
        batch["labels"][mask.cumsum(1) == 1] = IGNORED
    return batch


def without_positions():
    return {k: v for k, v in texts(LENGTHS, left=True).items() if k != "position_ids"}


def labeled_everywhere(*, is_empty=False):
    batch = texts(LENGTHS)
    mask = batch["attention_mask"] * (not is_empty)
    return batch | {"labels": batch["input_ids"].clone(), "attention_mask": mask}


EMPTY_ROWS = texts([9, 0, 3, 5, 0, 7]) | {"labels": torch.arange(6) % 3}
# Each case has the pattern of its padding warning, or an empty one.
PADDED: dict[str, tuple[Any, Any, str, str]] = {
    "all seen": (Reader(sees_padding=True), texts(LENGTHS), "tokens", "change without padding"),
    "no positions": (Reader(), without_positions(), "tokens", "position_ids"),
    "first word": (Shifting(), shifted(counts=True), "tokens", "without .*at the first word"),
    "first word ignored": (Shifting(), shifted(counts=False), "tokens", ""),
    "empty rows": (Pooling(sees_padding=False), EMPTY_ROWS, "samples", ""),
    "empty rows seen": (Pooling(sees_padding=True), EMPTY_ROWS, "samples", "padding"),
    "labels in padding": (Reader(), labeled_everywhere(), "tokens", ""),
    "labels of nothing": (Reader(), labeled_everywhere(is_empty=True), "tokens", ""),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_that_affects_results_is_kept_with_one_warning(name):
    model, batch, average, warning = PADDED[name]
    microbatcher = in_tokens(model, 12 if average == "samples" else 60, loss_average=average)
    with pytest.warns(PaddingWarning, match=warning) if warning else contextlib.nullcontext():
        result = exact(microbatcher, model, batch)
    assert result.num_microbatches == 4 or name != "all seen", "three rows of 17 each"
    if name.startswith("first word"):
        assert (model.seen[-1][1] == 20) is bool(warning)
    microbatcher.backward(batch)  # the warning is given once


@pytest.mark.parametrize("declared", [True, False])
def test_cut_padding_option_overrides_check(declared):
    model, unit = Reader(sees_padding=True), MicrobatchUnit("tokens", cut_padding=declared)
    result = in_tokens(model, unit=unit, probe=False).backward(texts(LENGTHS))
    lengths = {length for _, length in model.seen[-result.num_microbatches :]}
    assert (lengths == {17}) is not declared


def test_possibly_padded_tensor_must_be_declared():
    model, batch, seen = Reader(), texts(LENGTHS), list[Any]()
    batch["weights"] = torch.ones(11, 17)
    with pytest.raises(BatchError, match=r"'weights' of shape \(11, 17\) might be padded"):
        in_tokens(model).backward(batch)

    def note(_, arguments, given):
        seen.append(given["weights"].shape == given["input_ids"].shape)

    model.register_forward_pre_hook(note, with_kwargs=True)
    for declared, same in (("attention_mask", True), (None, False)):
        unit = MicrobatchUnit("tokens", padding={"weights": declared})
        in_tokens(model, 30, unit).backward(batch)
        assert all(each is same for each in seen[-3:])


def test_dimension_matching_length_by_chance_is_not_padding():
    microbatcher = in_tokens(Reader(), 30)
    for padded in (20, 17):
        microbatcher.backward(texts(LENGTHS, padded=padded) | {"features": torch.ones(11, 17)})


# Refused


UNSORTABLE: dict[str, Any] = {
    "neither an attention_mask": lambda batch: batch.pop("attention_mask"),
    "'x_lengths' looks like the lengths": lambda b: b.update(x_lengths=torch.ones(11).long()),
    "requires a gradient": lambda b: b.update(scale=torch.ones(11, 1, requires_grad=True)),
}


@pytest.mark.parametrize("message", UNSORTABLE)
def test_unsortable_batches_raise_batch_error(message):
    batch = texts(LENGTHS)
    UNSORTABLE[message](batch)
    with pytest.raises(BatchError, match=message):
        in_tokens(Reader()).backward(batch)


TOKENS_AND: dict[str, Any] = {"microbatch_unit": "tokens"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"microbatch_unit": "words"},
            "microbatch_unit='words' is not known; use one of rows, tokens, seconds, or a function",
        ),
        ({"microbatch_unit": "token"}, r"'token' is not known \(did you mean 'tokens'\?\)"),
        (
            TOKENS_AND | {"microbatch_size": "exlpore"},
            r"at least 1 \(of tokens, with padding\), \"auto\" \(found by halving\), None",
        ),
        (
            {"microbatch_unit": len, "eval_microbatch_size": 0},
            r"eval_microbatch_size=0 is not a size: .* \(of units of cost, with padding\)",
        ),
        ({"microbatch_unit": 3}, "microbatch_unit=3 is not a unit"),
        (TOKENS_AND | {"microbatch_size": "explore"}, "microbatch_size='auto'"),
        (TOKENS_AND | {"strict_divisible": True}, "which strict_div"),
        ({"padding": {"a": "b"}}, "microbatch_unit='rows' never cuts"),
        (TOKENS_AND | {"padding": {"a": 3}}, r"padding\['a'\] is 3"),
        (TOKENS_AND | {"cut_padding": "yes"}, "cut_padding='yes' is not known"),
    ],
)
def test_invalid_unit_options_are_rejected(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Microbatcher(Reader(), loss_average="tokens", **with_features(options))


@pytest.mark.parametrize("cost", [0.001, -1, float("nan"), "long", (1, 2, "x")])
def test_invalid_costs_raise_batch_error(cost):
    with pytest.raises(BatchError, match=r"microbatch_unit (returned|gives)"):
        in_tokens(Reader(), unit=MicrobatchUnit(lambda row: cost)).backward(texts(LENGTHS))


def test_state_in_rows_is_rejected_when_unit_is_tokens():
    rows, tokens = in_tokens(Reader(), features=()), in_tokens(Reader())
    tokens.load_state_dict(tokens.state_dict())
    with pytest.raises(ValueError, match="the sizes of this state are in rows"):
        tokens.load_state_dict(rows.state_dict())


# Costs


def test_seconds_are_read_from_batch():
    model, batch = Reader(), texts(LENGTHS)
    batch["durations"] = torch.tensor(LENGTHS) / 2
    microbatcher = in_tokens(model, 10, MicrobatchUnit("seconds"))
    assert exact(microbatcher, model, batch).microbatch_size <= 10
    del batch["durations"]
    with pytest.raises(BatchError, match="called 'seconds' or 'durations'"):
        microbatcher.backward(batch)


def test_lengths_next_to_mask_are_not_counted_twice():
    batch, sizes = texts(LENGTHS), set()
    for more in ({}, {"input_lengths": batch["attention_mask"].sum(1)}):
        result = in_tokens(Reader(), 40).backward(batch | more)
        sizes.add((result.microbatch_size, result.num_microbatches))
    assert len(sizes) == 1


def test_square_batch_with_rows_in_second_dimension_matches_gradient():
    model, given = Reader(), texts([5, 3, 2, 5, 1])
    batch = {name: each.T.contiguous() for name, each in given.items()}

    def forward(model, batch):
        return model(**{name: each.T for name, each in batch.items()})["loss"]

    options: dict[str, Any] = {"forward": forward, "batch_layout": 1}
    with pytest.raises(BatchError, match="neither an attention_mask"):
        in_tokens(model, **options).backward(batch)
    unit = MicrobatchUnit(lambda row: float(row["attention_mask"].sum()))
    microbatcher = in_tokens(model, 8, unit, **options)
    assert exact(microbatcher, model, batch, forward(model, batch)).num_microbatches > 1


# Memory


def refusing(numel: int, length: int, unit: MicrobatchUnit) -> tuple[Reader, Microbatcher]:
    """Return a model that runs out of memory with more words, or longer texts."""
    model = Reader()

    def run_out(_, arguments, given):
        if given["input_ids"].numel() > numel or given["input_ids"].shape[1] > length:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    microbatcher = in_tokens(model, "auto", unit, probe=False)
    model.register_forward_pre_hook(run_out, with_kwargs=True)
    return model, microbatcher


def test_short_rows_are_split_further_than_costlier_long_row():
    """This cost is not memory: many short rows cost less than the long row but need more memory."""
    batch = texts([20, *[4] * 40])
    unit = MicrobatchUnit(lambda row: float(row["attention_mask"].sum()) ** 2, cut_padding=True)
    model, microbatcher = refusing(60, 99, unit)
    plain = Reader()
    plain.load_state_dict(model.state_dict())
    expected, results = whole(plain, plain(**batch)["loss"]), list[StepResult]()
    for _ in range(4):
        model.zero_grad()
        results.append(microbatcher.backward(batch))
        assert difference(gradients(model), expected) < 1e-9
    assert results[0].ooms >= 1
    assert results[-1].ooms == 0, "what was found is kept"


def test_single_row_that_does_not_fit_raises():
    _, microbatcher = refusing(9999, 10, MicrobatchUnit("tokens", cut_padding=True))
    expected = r"a microbatch of 20 of \d+ tokens does not fit, and .*it has a single row"
    with pytest.raises(SampleTooLargeError, match=expected):
        microbatcher.backward(texts([20, *[4] * 12]))
    assert microbatcher.backward(texts([9, *[4] * 12])).num_samples == 13
