"""Rows of varying length are sorted, packed by cost and trimmed without changing results."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import BatchError, Microbatcher, PaddingWarning, SampleTooLargeError, StepResult
from automicro.features import MicrobatchUnit, Repeatable, UpdateMetric, with_features
from tests.cases import difference, gradients
from tests.ranks.steps import HalvingOnly
from tests.step.texts import IGNORED, Listener, Reader, sounds, texts, transcribe

LENGTHS = [9, 3, 17, 5, 5, 12, 2, 8, 16, 4, 7]
SIZES: list[Any] = [1, 17, 20, 40, 64, 500, None, "auto"]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the training forward changes attributes.*: seen")
        yield


def whole(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor | None]:
    """Return the gradient of plain torch on the whole batch, and clear it."""
    loss().backward()
    found = gradients(model)
    model.zero_grad()
    return found


def in_tokens(model: nn.Module, size: Any = 60, **options: Any) -> Microbatcher:
    given: dict[str, Any] = {
        "loss_average": "tokens",
        "features": [MicrobatchUnit("tokens")],
        **options,
    }
    return Microbatcher(model, microbatch_size=size, **given)


def exact(microbatcher: Microbatcher, model: nn.Module, batch: Any) -> StepResult:
    """Train on a batch and compare its gradient with that of plain torch."""
    expected = whole(model, lambda: model(**batch)["loss"])
    result = microbatcher.backward(batch)
    assert difference(gradients(model), expected) < 1e-9
    return result


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_texts_match_gradient_of_whole_batch(size: Any, left: bool) -> None:
    model, batch = Reader(), texts(LENGTHS, padded=21, left=left)
    expected = whole(model, lambda: model(**batch)["loss"])
    plain = model(**batch)
    model.seen.clear()
    microbatcher = in_tokens(model, size)
    result = microbatcher.backward(batch, return_outputs=True)
    assert difference(gradients(model), expected) < 1e-9
    assert float(result.loss) == pytest.approx(float(plain["loss"].detach()), abs=1e-12)
    assert result.microbatch_unit == "tokens"
    assert result.num_samples == len(LENGTHS)
    ran = model.seen[-result.num_microbatches :]
    assert sum(rows for rows, _ in ran) == len(LENGTHS)
    assert result.microbatch_size == max(rows * length for rows, length in ran)
    assert all(length <= 17 for _, length in ran), "padding that nobody needs was computed"
    if isinstance(size, int):
        assert all(rows * length <= size or rows == 1 for rows, length in ran)
    # Outputs match those of the whole batch, in its order and with its padding.
    real = batch["attention_mask"].bool()
    assert result.outputs["logits"].shape == plain["logits"].shape
    assert torch.allclose(result.outputs["logits"][real], plain["logits"][real], atol=1e-12)
    assert torch.allclose(result.outputs["pooled"], plain["pooled"], atol=1e-12)


@pytest.mark.parametrize("size", [1, 30, 100, None, "auto"])
def test_sounds_with_lengths_match_gradient_of_whole_batch(size: Any) -> None:
    model, batch = Listener(), sounds(LENGTHS)
    expected = whole(model, lambda: transcribe(model, batch)[0])
    microbatcher = Microbatcher(
        model,
        forward=transcribe,
        loss_average="samples",
        microbatch_size=size,
        features=[
            MicrobatchUnit(lambda row: (int(row["audio_lengths"]), int(row["label_lengths"])))
        ],
    )
    seen: list[tuple[int, int]] = []
    model.register_forward_pre_hook(lambda _, given: seen.append((*given[0].shape[:2],)))
    result = microbatcher.backward(batch, return_outputs=True)
    assert difference(gradients(model), expected) < 1e-9
    assert result.microbatch_unit == "units of cost"
    # The cost is frames times letters, each of the longest row of a slice.
    ran = seen[-result.num_microbatches :]
    assert result.microbatch_size >= max(rows * frames for rows, frames in ran)
    assert len({frames for _, frames in ran}) > 1
    assert torch.allclose(result.outputs, transcribe(model, batch)[1], atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tuple_batch_with_padding_matches_gradient_of_whole_batch(reduction: str) -> None:
    model = nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 23)).double()
    given = texts(LENGTHS)
    batch = (given["input_ids"], given["labels"], given["attention_mask"])

    class Words(nn.CrossEntropyLoss):
        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            return super().forward(logits.flatten(0, 1), targets.flatten())

    loss_fn = Words(reduction=reduction)
    expected = whole(model, lambda: loss_fn(model(batch[0]), batch[1]))
    microbatcher = Microbatcher(
        model,
        forward=lambda model, each: loss_fn(model(each[0]), each[1]),
        loss_average="none" if reduction == "sum" else lambda each: (each[1] != IGNORED).sum(),
        microbatch_size=30,
        features=[MicrobatchUnit("tokens", padding={"0": "2", "1": "2"})],
    )
    microbatcher.backward(batch)
    assert difference(gradients(model), expected) < 1e-9


def test_accumulated_batches_match_gradient_of_combined_loss() -> None:
    model = Reader()
    batches = [texts(LENGTHS, padded=30), texts([4, 30, 6])]
    microbatcher = in_tokens(model, 40)

    def loss() -> Tensor:
        counts = [float((each["labels"] != IGNORED).sum()) for each in batches]
        losses = [model(**each)["loss"] for each in batches]
        together: Tensor = sum(n * each for n, each in zip(counts, losses, strict=True))
        return together / sum(counts)

    expected = whole(model, loss)
    result = microbatcher.accumulate(batches, return_outputs=True)
    assert difference(gradients(model), expected) < 1e-9
    assert result.outputs["pooled"].shape == (14, 8)


def test_evaluation_and_prediction_keep_row_order() -> None:
    model, batch = Reader(dropout=0.5), texts(LENGTHS)
    model.eval()
    plain = model(**batch)
    model.train()
    microbatcher = Microbatcher(
        model, eval_microbatch_size=24, features=[MicrobatchUnit("tokens")], loss_average="tokens"
    )
    result = microbatcher.evaluate(batch, return_outputs=True)
    real = batch["attention_mask"].bool()
    assert float(result.loss) == pytest.approx(float(plain["loss"].detach()))  # type: ignore[arg-type]
    assert torch.allclose(result.outputs["logits"][real], plain["logits"][real])
    del batch["labels"]
    predicted = microbatcher.predict(batch)
    assert torch.allclose(predicted["logits"][real], plain["logits"][real])
    assert torch.allclose(predicted["pooled"], plain["pooled"])


def test_metrics_that_store_rows_keep_row_order() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    model, batch = Reader(), texts(LENGTHS)
    microbatcher = Microbatcher(
        model,
        eval_microbatch_size=24,
        features=[
            MicrobatchUnit("tokens"),
            UpdateMetric(lambda metric, outputs, each: metric.update(outputs["pooled"].sum(-1))),
        ],
        loss_average="tokens",
    )
    kept = torchmetrics.CatMetric()
    for given in (batch, texts([3, 1, 30])):
        result = microbatcher.evaluate(given, kept, return_outputs=True)
        assert result.num_microbatches > 1
    expected = [model(**given)["pooled"].sum(-1).detach() for given in (batch, texts([3, 1, 30]))]
    assert torch.allclose(kept.compute().double(), torch.cat(expected), atol=1e-5)


class Shifting(Reader):
    """Its labels are its words, and each is predicted from the words before it."""

    def forward(self, *ids: Any, labels: Tensor | None = None, **given: Any) -> Any:
        assert labels is not None
        following = labels.roll(-1, 1)
        following[:, -1] = IGNORED
        return super().forward(*ids, labels=following, **given)  # type: ignore[misc]


class Pooling(nn.Module):
    """Classify each row by the mean over its words, or over its words and padding."""

    def __init__(self, *, sees_padding: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(23, 8), nn.Linear(8, 3)
        self.sees_padding = sees_padding
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        mask = attention_mask[..., None].double()
        count = mask.shape[1] if self.sees_padding else mask.sum(1).clamp(min=1)
        logits = self.head((self.embed(input_ids) * mask).sum(1) / count)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def shifted(*, counts: bool) -> dict[str, Tensor]:
    """Return left-padded texts; without padding, the shortest text would have no loss."""
    batch = texts([*LENGTHS, 1], padded=20, left=True)
    mask = batch["attention_mask"]
    batch["labels"] = torch.where(mask == 1, batch["input_ids"], IGNORED)
    if not counts:
        batch["labels"][mask.cumsum(1) == 1] = IGNORED
    return batch


def without(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != name}


def labeled_everywhere(*, is_empty: bool = False) -> dict[str, Tensor]:
    batch = texts(LENGTHS)
    mask = batch["attention_mask"] * (not is_empty)
    return batch | {"labels": batch["input_ids"].clone(), "attention_mask": mask}


EMPTY_ROWS = texts([9, 0, 3, 5, 0, 7]) | {"labels": torch.arange(6) % 3}
# Each case has the pattern of its padding warning, or an empty one.
PADDED: dict[str, tuple[Any, dict[str, Tensor], str, str]] = {
    "all seen": (
        Reader(sees_padding=True),
        texts(LENGTHS),
        "tokens",
        "results change without padding",
    ),
    "no positions": (
        Reader(),
        without("position_ids", texts(LENGTHS, left=True)),
        "tokens",
        "position_ids",
    ),
    "first word": (Shifting(), shifted(counts=True), "tokens", "without .*at the first word"),
    "first word ignored": (Shifting(), shifted(counts=False), "tokens", ""),
    "empty rows": (Pooling(sees_padding=False), EMPTY_ROWS, "samples", ""),
    "empty rows seen": (Pooling(sees_padding=True), EMPTY_ROWS, "samples", "padding"),
    "labels in padding": (Reader(), labeled_everywhere(), "tokens", ""),
    "labels of nothing": (Reader(), labeled_everywhere(is_empty=True), "tokens", ""),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_that_affects_results_is_kept_with_one_warning(name: str) -> None:
    model, batch, average, warning = PADDED[name]
    size = 12 if average == "samples" else 60
    microbatcher = in_tokens(model, size, loss_average=average)
    with pytest.warns(PaddingWarning, match=warning) if warning else contextlib.nullcontext():
        result = exact(microbatcher, model, batch)
    assert result.num_microbatches == 4 or name != "all seen", "three rows of 17 each"
    if name.startswith("first word"):
        assert (model.seen[-1][1] == 20) is bool(warning)
    microbatcher.backward(batch)  # the warning is given once


@pytest.mark.parametrize("declared", [True, False])
def test_cut_padding_option_overrides_check(declared: bool) -> None:
    model, batch = Reader(sees_padding=True), texts(LENGTHS)
    features = [MicrobatchUnit("tokens", cut_padding=declared)]
    microbatcher = in_tokens(model, features=features, probe=False)
    result = microbatcher.backward(batch)
    lengths = {length for _, length in model.seen[-result.num_microbatches :]}
    assert (lengths == {17}) is not declared


def test_possibly_padded_tensor_must_be_declared() -> None:
    model, batch = Reader(), texts(LENGTHS)
    batch["weights_of_words"] = torch.ones(11, 17)
    options: dict[str, Any] = {"microbatch_unit": "tokens", "loss_average": "tokens"}
    with pytest.raises(BatchError, match=r"'weights_of_words' of shape \(11, 17\) might be padded"):
        Microbatcher(model, **with_features(options)).backward(batch)
    seen: list[tuple[Any, Any]] = []

    def note(_: nn.Module, arguments: Any, given: dict[str, Tensor]) -> None:
        seen.append((given["weights_of_words"].shape, given["input_ids"].shape))

    model.register_forward_pre_hook(note, with_kwargs=True)
    for declared, same in (("attention_mask", True), (None, False)):
        seen.clear()
        microbatcher = Microbatcher(
            model,
            microbatch_size=30,
            **with_features({**options, "padding": {"weights_of_words": declared}}),
        )
        microbatcher.backward(batch)
        assert all(one == other for one, other in seen[-3:]) is same


def test_dimension_matching_length_by_chance_is_not_padding() -> None:
    model = Reader()
    microbatcher = in_tokens(model, 30)
    for padded in (20, 17):
        batch = texts(LENGTHS, padded=padded)
        batch["features"] = torch.ones(11, 17)
        microbatcher.backward(batch)
    assert model.seen


@pytest.mark.parametrize(
    ("change", "message"),
    {
        "no lengths": (lambda batch: batch.pop("attention_mask"), "neither an attention_mask"),
        "lengths of nothing": (
            lambda batch: batch.update(x_lengths=torch.ones(11).long()),
            "'x_lengths' looks like the lengths",
        ),
        "a gradient": (
            lambda batch: batch.update(scale=torch.ones(11, 1, requires_grad=True)),
            "requires a gradient",
        ),
    }.values(),
)
def test_unsortable_batches_raise_batch_error(change: Callable[[Any], Any], message: str) -> None:
    model, batch = Reader(), texts(LENGTHS)
    change(batch)
    with pytest.raises(BatchError, match=message):
        in_tokens(model).backward(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"microbatch_unit": "words"},
            "microbatch_unit='words' is not known; use one of rows, tokens, seconds, or a function",
        ),
        ({"microbatch_unit": "token"}, r"'token' is not known \(did you mean 'tokens'\?\)"),
        (
            {"microbatch_unit": "tokens", "microbatch_size": "exlpore"},
            r"at least 1 \(of tokens, with padding\), \"auto\" \(found by halving\), None",
        ),
        (
            {"microbatch_unit": len, "eval_microbatch_size": 0},
            r"eval_microbatch_size=0 is not a size: .* \(of units of cost, with padding\)",
        ),
        ({"microbatch_unit": 3}, "microbatch_unit=3 is not a unit"),
        ({"microbatch_unit": "tokens", "microbatch_size": "explore"}, "microbatch_size='auto'"),
        ({"microbatch_unit": "tokens", "strict_divisible": True}, "which strict_div"),
        ({"padding": {"a": "b"}}, "microbatch_unit='rows' never cuts"),
        ({"microbatch_unit": "tokens", "padding": {"a": 3}}, r"padding\['a'\] is 3"),
        ({"microbatch_unit": "tokens", "cut_padding": "yes"}, "cut_padding='yes' is not known"),
    ],
)
def test_invalid_unit_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Microbatcher(Reader(), loss_average="tokens", **with_features(options))


@pytest.mark.parametrize("cost", [0.001, -1, float("nan"), "long", (1, 2, "x")])
def test_invalid_costs_raise_batch_error(cost: Any) -> None:
    microbatcher = in_tokens(Reader(), features=[MicrobatchUnit(lambda row: cost)])
    with pytest.raises(BatchError, match=r"microbatch_unit (returned|gives)"):
        microbatcher.backward(texts(LENGTHS))


def test_seconds_are_read_from_batch() -> None:
    model, batch = Reader(), texts(LENGTHS)
    batch["durations"] = torch.tensor(LENGTHS) / 2
    microbatcher = in_tokens(model, 10, features=[MicrobatchUnit("seconds")])
    assert exact(microbatcher, model, batch).microbatch_size <= 10
    del batch["durations"]
    with pytest.raises(BatchError, match="called 'seconds' or 'durations'"):
        microbatcher.backward(batch)


def test_limit_is_learned_in_tokens_and_retries_stay_exact() -> None:
    """Results equal, bit for bit, a run with known sizes and without limit, even with dropout."""

    def train(size: Any, limit: str | None) -> tuple[list[Any], list[Tensor]]:
        torch.manual_seed(0)
        model = Reader(dropout=0.3)
        optimizer = torch.optim.Adam(model.parameters())
        microbatcher = Microbatcher(
            model,
            microbatch_size=size,
            features=[MicrobatchUnit("tokens"), Repeatable()],
            loss_average="tokens",
            memory_limit=limit,
            optimizer=optimizer,
        )
        results = []
        for seed in range(4):
            lengths = torch.randint(2, 40, (32,), generator=torch.Generator().manual_seed(seed))
            results.append(microbatcher.backward(texts(lengths.tolist())))
            optimizer.step()
            optimizer.zero_grad()
        return results, [p.detach().clone() for p in model.parameters()]

    results, parameters = train("auto", "130KiB")
    assert sum(each.ooms for each in results) >= 1
    assert all(each.microbatch_size <= 700 for each in results)
    sizes = [each.microbatch_size for each in results]
    _, expected = train(HalvingOnly(1, sizes), None)
    assert all(map(torch.equal, parameters, expected))


def test_error_for_oversized_row_counts_tokens() -> None:
    microbatcher = in_tokens(Reader(), "auto", memory_limit="60KiB")
    expected = r"of \d+ tokens does not fit, and .* single row"
    with pytest.raises(SampleTooLargeError, match=expected):
        microbatcher.backward(texts([60, 3, 2]))


def test_state_in_rows_is_rejected_when_unit_is_tokens() -> None:
    rows, tokens = in_tokens(Reader(), features=()), in_tokens(Reader())
    tokens.load_state_dict(tokens.state_dict())
    with pytest.raises(ValueError, match="the sizes of this state are in rows"):
        tokens.load_state_dict(rows.state_dict())


def test_short_rows_are_split_further_than_costlier_long_row() -> None:
    """This cost is not memory: many short rows cost less than the long row but need more memory."""
    model, batch = Reader(), texts([20, *[4] * 40])
    expected = whole(model, lambda: model(**batch)["loss"])

    def run_out(_: nn.Module, __: Any, given: dict[str, Tensor]) -> None:
        if given["input_ids"].numel() > 60:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    unit = MicrobatchUnit(lambda row: float(row["attention_mask"].sum()) ** 2, cut_padding=True)
    microbatcher = in_tokens(model, "auto", features=[unit], probe=False)
    model.register_forward_pre_hook(run_out, with_kwargs=True)
    results = []
    for _ in range(4):
        model.zero_grad()
        results.append(microbatcher.backward(batch))
        assert difference(gradients(model), expected) < 1e-9
    assert results[0].ooms >= 1
    assert results[-1].ooms == 0, "what was found is kept"


def test_single_row_that_does_not_fit_raises() -> None:
    model = Reader()

    def run_out(_: nn.Module, __: Any, given: dict[str, Tensor]) -> None:
        if given["input_ids"].shape[1] > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    model.register_forward_pre_hook(run_out, with_kwargs=True)
    features = [MicrobatchUnit("tokens", cut_padding=True)]
    microbatcher = in_tokens(model, "auto", features=features, probe=False)
    with pytest.raises(SampleTooLargeError, match=r"a microbatch of 20 of .* it has a single row"):
        microbatcher.backward(texts([20, *[4] * 12]))
    assert microbatcher.backward(texts([9, *[4] * 12])).num_samples == 13


def test_lengths_next_to_mask_are_not_counted_twice() -> None:
    model, batch = Reader(), texts(LENGTHS)
    sizes = []
    for more in ({}, {"input_lengths": batch["attention_mask"].sum(1)}):
        microbatcher = in_tokens(model, 40)
        result = microbatcher.backward({**batch, **more})
        sizes.append((result.microbatch_size, result.num_microbatches))
    assert sizes[0] == sizes[1]


def test_equal_row_and_position_counts_match_gradient() -> None:
    model, batch = Listener(), sounds([16, 3, 9, 5, 12, 2, 8, 7])
    assert batch["labels"].shape[1] == len(batch["audio_lengths"]) == 8
    expected = whole(model, lambda: transcribe(model, batch)[0])
    microbatcher = Microbatcher(
        model,
        forward=transcribe,
        loss_average="samples",
        microbatch_size=30,
        features=[MicrobatchUnit("tokens")],
    )
    microbatcher.backward(batch)
    assert difference(gradients(model), expected) < 1e-9


def test_square_batch_with_rows_in_second_dimension_matches_gradient() -> None:
    model, given = Reader(), texts([5, 3, 2, 5, 1])
    batch = {name: each.T.contiguous() for name, each in given.items()}

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**{name: each.T for name, each in batch.items()})["loss"]
        return loss

    expected = whole(model, lambda: forward(model, batch))
    options: dict[str, Any] = {"forward": forward, "batch_layout": 1, "loss_average": "tokens"}
    with pytest.raises(BatchError, match="neither an attention_mask"):
        Microbatcher(model, features=[MicrobatchUnit("tokens")], **options).backward(batch)
    microbatcher = Microbatcher(
        model,
        microbatch_size=8,
        features=[MicrobatchUnit(lambda row: float(row["attention_mask"].sum()))],
        **options,
    )
    assert microbatcher.backward(batch).num_microbatches > 1
    assert difference(gradients(model), expected) < 1e-9
