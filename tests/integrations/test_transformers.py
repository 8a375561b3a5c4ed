"""Hugging Face's Trainer with one line: the same without a limit, and alive with one."""

import gc
import inspect
import itertools
import json
import random
import weakref
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import DistributedType
from torchmetrics.classification import MulticlassAccuracy
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    Seq2SeqTrainer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import logging

from automicro import (
    BatchError,
    LossAverageError,
    LossError,
    MemoryBudget,
    MetricWarning,
    SampleTooLargeError,
    StateWarning,
)
from automicro.integrations.transformers import Sequences, enable
from tests.integrations import transformers_runs as runs
from tests.integrations.launching import torchrun
from tests.integrations.transformers_runs import (
    CASES,
    Case,
    furthest,
    logged,
    losses,
    make,
    run,
    timeless,
)

LIMITS = 20
# Before transformers 5.16 a smoothed loss is no mean of a step's items, and is summed in fp32.
COUNTS_SMOOTHED = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
# Of peft's, which asks transformers for what it has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated")


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    logging.set_verbosity_error()
    yield
    capsys.readouterr()


TRL = ("SFT", "DPO", "Reward")
_OF_TRL = (
    pytest.mark.filterwarnings("ignore"),  # of theirs, which change with each version
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),
)
_OF_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")


def of_trl(*names: str, more: Sequence[Any] = ()) -> list[Any]:
    return [pytest.param(name, marks=[*_OF_TRL, *more]) for name in names]


EVERY = [pytest.param(name, marks=[_OF_PEFT] * (name == "frozen base")) for name in CASES]
EVERY += of_trl(*runs.OF_TRL)


def trainer_of(name: str, folder: Path, **how: Any) -> Any:
    return make(CASES.get(name, name), folder, **how)


def long(name: str) -> dict[str, Any]:
    """Activations of these rows are most of what a step of TRL's takes."""
    if name in CASES:
        return {}
    return {"words": (60, 100), "max_length": None if "padding" in name else 112}


def peak_of(case: Case | str, folder: Path, **arguments: Any) -> int:
    with MemoryBudget("4GiB") as budget:
        make(case, folder, **arguments).train()
    return budget.peak_bytes


def check_rows(found: Any, expected: Any) -> None:
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=2e-6, abs=2e-6)


# The same as the trainer alone


@pytest.mark.parametrize("name", EVERY)
def test_without_a_limit_every_bit_is_the_trainers_own(name: str, tmp_path: Path) -> None:
    plain, ours = (
        run(trainer_of(name, tmp_path, dropout=0.1, with_us=with_us)) for with_us in (False, True)
    )
    assert all(map(torch.equal, ours[0], plain[0]))
    assert ours[1:] == plain[1:]


@pytest.mark.parametrize("name", EVERY)
def test_in_microbatches_it_is_the_same_but_for_rounding(name: str, tmp_path: Path) -> None:
    """TRL computes logarithms of probabilities in fp32, whatever the model's type is."""
    sizes = {"microbatch_size": 3, "eval_microbatch_size": 3}
    plain = trainer_of(name, tmp_path, dtype=torch.float64)
    ours = trainer_of(name, tmp_path, dtype=torch.float64, with_us=True, options=sizes)
    expected, found = run(plain), run(ours)
    assert ours.automicro.last.num_microbatches > 1
    is_rounded = "smoothing" in name and not COUNTS_SMOOTHED
    close = 1e-6 if is_rounded else 1e-12 if name in (*CASES, "Reward") else 1e-7
    assert furthest(found[0], expected[0]) < close
    check_rows(found[1], expected[1])
    assert found[2] == expected[2]
    check_rows([timeless(ours.evaluate())], [timeless(plain.evaluate())])


@pytest.mark.parametrize(("bf16", "close"), [(False, 1e-6), (True, 1e-3)])
@pytest.mark.parametrize("name", ["causal", *of_trl(*TRL, "SFT, without padding")])
def test_at_half_of_the_peak_the_trainer_dies_and_with_the_line_it_does_not(
    name: str, bf16: bool, close: float, tmp_path: Path
) -> None:
    how = {"bf16": bf16, **long(name)}
    plain = trainer_of(name, tmp_path, **how)
    with MemoryBudget("4GiB") as budget:
        expected = run(plain)
    held = budget.peak_bytes // 2
    with pytest.raises(torch.OutOfMemoryError), MemoryBudget(held):
        trainer_of(name, tmp_path, **how).train()
    ours = trainer_of(name, tmp_path, with_us=True, **how)
    with MemoryBudget(held):
        found = run(ours)
    assert ours.automicro.microbatch_size < 8
    assert losses(found[1]) == pytest.approx(losses(expected[1]), rel=close)
    assert found[1][-2].get("num_tokens") == expected[1][-2].get("num_tokens")
    assert found[2] == expected[2]


@pytest.mark.parametrize("name", ["accumulation 4", *of_trl(*TRL)])
def test_a_limit_in_float64_changes_parameters_by_rounding_alone(name: str, tmp_path: Path) -> None:
    """Of SFT and DPO TRL adds the gradient of the head up in fp32, however a batch is cut."""
    how = {"dtype": torch.float64, **long(name)}
    plain = trainer_of(name, tmp_path, **how)
    with MemoryBudget("4GiB") as budget:
        expected = run(plain)
    ours = trainer_of(name, tmp_path, with_us=True, **how)
    with MemoryBudget(budget.peak_bytes // 2):
        found = run(ours)
    assert ours.automicro.microbatch_size < 8
    assert furthest(found[0], expected[0]) < (1e-6 if name in ("SFT", "DPO") else 1e-12)


@pytest.mark.parametrize(
    "name", ["causal", *of_trl(*TRL, more=[pytest.mark.sweep, pytest.mark.timeout(600)])]
)
def test_at_any_limit_it_is_right_or_says_that_a_row_is_too_large(
    name: str, tmp_path: Path
) -> None:
    how = {"dtype": torch.float64, "num_train_epochs": 1, **long(name)}
    how |= {} if name in CASES else {"rows": 12}
    plain = run(trainer_of(name, tmp_path, **how))
    most = peak_of(CASES.get(name, name), tmp_path, **how)
    ended, refused = 0, 0
    for number in range(1, LIMITS + 1):
        ours = trainer_of(name, tmp_path, with_us=True, **how)
        try:
            with MemoryBudget(most * number // LIMITS):
                found = run(ours)
        except SampleTooLargeError:
            refused += 1
            assert all(each.grad is None for each in ours.model.parameters())
            continue
        ended += 1
        assert furthest(found[0], plain[0]) < (1e-6 if name in ("SFT", "DPO") else 1e-12)
        check_rows(found[1], plain[1])
    assert ended >= LIMITS // 3
    assert ended + refused == LIMITS


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 3}])
@pytest.mark.parametrize("name", ["causal", *of_trl(*TRL)])
def test_a_loss_scale_moves_as_it_does_without_us(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Of fp16, on a device without fp16: the scale grows, overflows, and a step is left out."""
    found = []
    how = {} if name in CASES else {"rows": 44}
    for with_us in (False, True):
        trainer = trainer_of(name, tmp_path, with_us=with_us, options=options, **how)
        scales = runs.Scales(trainer, 2.0 ** (125 if name in CASES else 126)).seen
        found.append((scales, run(trainer)))
    (expected, plain), (scales, ours) = found
    moves = list(itertools.pairwise(expected))
    assert any(after > before for before, after in moves)
    assert any(after < before for before, after in moves)
    assert scales == expected
    assert losses(ours[1]) == pytest.approx(losses(plain[1]), rel=1e-6)
    assert furthest(ours[0], plain[0]) <= (1e-5 if options else 0.0)


# Evaluation


def mean_of_logits(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"mean": float(logits.mean()), "rows": float(len(labels))}


class Adding:
    """For ``batch_eval_metrics``: called with each batch, and asked at the last."""

    def __init__(self) -> None:
        self.total, self.calls = 0.0, 0

    def __call__(self, prediction: Any, compute_result: bool = False) -> dict[str, float]:
        self.total += float(prediction.predictions.sum())
        self.calls += 1
        return {"total": self.total, "calls": self.calls}


OF_LOSSES = ("causal", "label smoothing", "classifier", "own module", "loss function, a sum")


@pytest.mark.parametrize("name", [*OF_LOSSES, *of_trl(*TRL)])
def test_an_evaluation_in_less_memory_has_the_same_metrics(name: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"dtype": torch.float64, **long(name)}
    how |= {"compute_metrics": mean_of_logits} if name in CASES else {}
    plain = trainer_of(name, tmp_path, **how)
    with MemoryBudget("4GiB") as budget:
        expected = timeless(plain.evaluate())
    ours = trainer_of(name, tmp_path, with_us=True, **how)
    with MemoryBudget(budget.peak_bytes * 6 // 10):
        found = timeless(ours.evaluate())
    assert ours.automicro.eval_microbatch_size < 8
    check_rows([found], [expected])
    if name in CASES:
        assert found["eval_rows"] == 20
        assert found["eval_mean"] == pytest.approx(expected["eval_mean"], rel=1e-9)


def test_metrics_by_batch_are_called_as_often(tmp_path: Path) -> None:
    found = []
    for with_us in (False, True):
        trainer = make(
            CASES["classifier"],
            tmp_path,
            with_us=with_us,
            dtype=torch.float64,
            options={"eval_microbatch_size": 3},
            batch_eval_metrics=True,
            compute_metrics=Adding(),
        )
        found.append(trainer.evaluate())
    assert found[1]["eval_calls"] == found[0]["eval_calls"] == 3
    assert found[1]["eval_total"] == pytest.approx(found[0]["eval_total"], rel=1e-12)


def test_predictions_without_labels_are_those_of_the_trainer(tmp_path: Path) -> None:
    found = []
    for with_us in (False, True):
        case = Case(model=runs.bert, data=runs.unlabelled)
        trainer = make(
            case,
            tmp_path,
            with_us=with_us,
            dtype=torch.float64,
            options={"eval_microbatch_size": 3},
        )
        found.append(trainer.predict(runs.unlabelled(20)))
    assert found[0].label_ids is None
    assert found[1].label_ids is None
    assert found[1].predictions == pytest.approx(found[0].predictions, abs=1e-14)


def test_generated_tokens_are_those_of_the_trainer(tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainingArguments

    found = []
    for with_us in (False, True):
        torch.manual_seed(0)
        trainer: Any = Seq2SeqTrainer(
            runs.t5(0.0).double(),
            Seq2SeqTrainingArguments(
                output_dir=str(tmp_path),
                per_device_eval_batch_size=8,
                predict_with_generate=True,
                generation_max_length=9,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
            ),
        )
        if with_us:
            enable(trainer, eval_microbatch_size=3)
        found.append(trainer.predict(runs.tokens(20)))
    assert (found[1].predictions == found[0].predictions).all()
    assert (found[1].label_ids == found[0].label_ids).all()
    assert found[1].metrics["test_loss"] == pytest.approx(found[0].metrics["test_loss"], rel=1e-12)


# Going on


class Stop(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.at


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("name", ["causal", *of_trl(*TRL)])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    name: str, first: bool, then: bool, tmp_path: Path
) -> None:
    """Also where the checkpoint is the plain trainer's and we go on, and the other way round."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "dropout": 0.1}
    expected = run(trainer_of(name, tmp_path / "whole", **saving))
    stopped = trainer_of(name, tmp_path / "parts", with_us=first, **saving)
    stopped.add_callback(Stop(2))
    stopped.train()
    resumed = trainer_of(name, tmp_path / "parts", with_us=then, **saving)
    resumed.train(resume_from_checkpoint=True)
    assert stopped.state.global_step == 2 < resumed.state.global_step
    assert all(map(torch.equal, runs.parameters(resumed), expected[0]))
    assert losses(logged(resumed)) == losses(expected[1])
    if name in CASES:  # TRL counts tokens anew
        assert logged(resumed)[:-1] == expected[1][:-1]


def test_sizes_travel_in_the_state_of_the_trainer(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "with_us": True}
    held = peak_of(CASES["causal"], tmp_path) // 2
    with MemoryBudget(held):
        first = make(CASES["causal"], tmp_path, **saving)
        first.add_callback(Stop(4))
        first.train()
    kept = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert "train" in kept["stateful_callbacks"]["Sizes"]["attributes"]["found"]
    with MemoryBudget(held):
        resumed = make(CASES["causal"], tmp_path, **saving)
        failures = []
        step = resumed.training_step

        def counted(*args: Any) -> Tensor:
            loss: Tensor = step(*args)
            failures.append(resumed.automicro.last.ooms)
            return loss

        resumed.training_step = counted
        resumed.train(resume_from_checkpoint=True)
    assert first.automicro.microbatch_size < 8
    assert failures[0] == 0


def interrupt(trainer: Any, *, forwards: int) -> None:
    """Train, and be interrupted in the fourth step, after so many of its forwards."""
    calls, start = 0, {name: each.clone() for name, each in trainer.model.state_dict().items()}

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += trainer.state.global_step == 3
        if calls > forwards:
            raise KeyboardInterrupt

    handle = trainer.model.register_forward_pre_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    handle.remove()
    trainer.model.load_state_dict(start)


def test_interrupted_in_a_step_the_trainer_is_as_it_was_and_trains_again(tmp_path: Path) -> None:
    plain = make(CASES["causal"], tmp_path, dtype=torch.float64)
    interrupt(plain, forwards=0)
    expected = run(plain)
    options = {"microbatch_size": 3}
    ours = make(CASES["causal"], tmp_path, dtype=torch.float64, with_us=True, options=options)
    backward = ours.accelerator.backward
    interrupt(ours, forwards=1)
    assert ours.accelerator.backward == backward
    assert "train" not in vars(ours.model)
    found = run(ours)
    assert furthest(found[0], expected[0]) < 1e-12
    ours.automicro.disable()
    assert ours.training_step.__func__ is Trainer.training_step
    assert ours.automicro is None
    enable(ours)


# What is told, and refused


EVERY_BATCH_WHOLE = {"microbatch_size": None, "eval_microbatch_size": None}


def test_a_loss_that_is_divided_in_part_is_refused_and_trains_as_the_remedy_says(
    tmp_path: Path,
) -> None:
    case = Case(model=runs.TwoLosses, data=runs.classes, arguments={"eval_strategy": "epoch"})
    refusal = r"in part only: of one row it is .* auxiliary.* eval_microbatch_size=None"
    # Where nothing but evaluation is cut, at the first one.
    for options, steps in (({}, 0), ({"microbatch_size": 3}, 0), ({"microbatch_size": None}, 6)):
        ours = make(case, tmp_path, with_us=True, options=options)
        with pytest.raises(ValueError, match=refusal):
            ours.train()
        assert ours.state.global_step == steps
    ours = make(case, tmp_path, with_us=True, options=EVERY_BATCH_WHOLE)
    found, expected = run(ours), run(make(case, tmp_path))
    assert all(map(torch.equal, found[0], expected[0]))
    assert found[1:] == expected[1:]


class Declared(nn.Module):
    """A model whose batches have rows where `batch_layout` says."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(
        self, x: Tensor, labels: Tensor, prior: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        logits = self.head(self.body(x)[0].mean(0))
        if prior is not None:
            logits = logits + prior.log()
        items = kwargs.get("num_items_in_batch")
        summed = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return {"loss": summed / (len(logits) if items is None else items), "logits": logits}


class DeclaredMean(Declared):
    """The same without `num_items_in_batch`: a mean over its rows."""

    def forward(  # type: ignore[override]
        self, x: Tensor, labels: Tensor, prior: Tensor | None = None
    ) -> dict[str, Tensor]:
        return super().forward(x, labels, prior)


def collated(
    rows: list[dict[str, Tensor]], *, every: bool = False, prior: int = 0
) -> dict[str, Tensor]:
    """A batch with time first; with rows in dimension 1 of every tensor; and with a table."""
    ids = torch.stack([row["input_ids"] for row in rows], 1)
    labels = torch.stack([row["labels"] for row in rows])
    batch = {"x": F.one_hot(ids % 4, 4).float(), "labels": labels[None] if every else labels}
    return {**batch, "prior": torch.full((prior,), 1 / 3)} if prior else batch


LAYOUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "time first": ({}, {"x": 1}),
    "rows in dimension 1 everywhere": ({"every": True}, 1),
    "a table beside them": ({"prior": 3}, {"x": 1, "prior": "shared"}),
}


@pytest.mark.parametrize("model", [Declared, DeclaredMean])
@pytest.mark.parametrize("length", [5, 8])  # as many time steps as rows, too
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_declared_layout_holds_wherever_a_batch_is_cut_or_counted(
    name: str, length: int, model: Any, tmp_path: Path
) -> None:
    form, layout = LAYOUTS[name]

    def short() -> list[dict[str, Tensor]]:
        return [{**row, "input_ids": row["input_ids"][:length]} for row in runs.classes(20)]

    case = Case(model=lambda dropout: model().double(), data=lambda *_: short())
    given: dict[str, Any] = {
        "dtype": torch.float64,
        "data_collator": lambda rows: {
            name: each.double() if each.is_floating_point() else each
            for name, each in collated(rows, **form).items()
        },
        "remove_unused_columns": False,
        "eval_strategy": "epoch",
        "prediction_loss_only": True,
        "num_train_epochs": 1,
    }
    expected = run(make(case, tmp_path, **given))
    for size in ("auto", 3):
        sizes = {"microbatch_size": size, "eval_microbatch_size": size, "batch_layout": layout}
        ours = make(case, tmp_path, with_us=True, options=sizes, **given)
        found = run(ours)
        assert ours.automicro.last.num_samples == 4
        assert ours.automicro.last.num_microbatches == (1 if size == "auto" else 2)
        assert furthest(found[0], expected[0]) < 1e-12
        told, its = ([row.get("eval_loss", 0.0) for row in each[1]] for each in (found, expected))
        assert told == pytest.approx(its, rel=1e-6)


class Images(nn.Module):
    """Puts what it makes of all images of a batch in the places of their tokens, as VLMs do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.vision = nn.Embedding(10, 8), nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(
        self, input_ids: Tensor, images: Tensor, labels: Tensor, **kwargs: Any
    ) -> dict[str, Tensor]:
        places = input_ids == 9
        if int(places.sum()) != len(images):
            raise ValueError(f"{int(places.sum())} image tokens, and {len(images)} images")
        hidden = self.embedding(input_ids).masked_scatter(places[..., None], self.vision(images))
        loss = F.cross_entropy(self.head(hidden.mean(1)), labels, reduction="sum")
        return {"loss": loss / kwargs.get("num_items_in_batch", len(labels))}


class ImagesMean(Images):
    """The same as a mean, which takes `num_items_in_batch` and leaves it alone."""

    def forward(
        self, input_ids: Tensor, images: Tensor, labels: Tensor, **kwargs: Any
    ) -> dict[str, Tensor]:
        return super().forward(input_ids, images, labels)


def with_images(counts: list[int]) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (len(counts), 5), generator=drawn)
    for row, count in enumerate(counts):
        ids[row, :count] = 9
    images = torch.randn(sum(counts), 6, generator=drawn)
    return {"input_ids": ids, "images": images, "labels": torch.arange(len(counts)) % 3}


UNEVEN = {
    "as many images as rows, by chance": ([2, 2, 0, 2, 0, 2, 0, 0], {}),
    "all in the last row": ([0, 0, 0, 0, 0, 0, 3, 5], {}),
    "declared as shared": ([2, 1, 0, 1], {"batch_layout": {"images": "shared"}}),
    "more than rows": ([2, 1, 0, 2], {}),
}


@pytest.mark.parametrize("model", [Images, ImagesMean])
@pytest.mark.parametrize("name", UNEVEN)
def test_rows_that_share_one_tensor_unevenly_are_refused_by_name_or_stay_whole(
    name: str, model: Any, tmp_path: Path
) -> None:
    counts, options = UNEVEN[name]
    case = Case(model=lambda dropout: model(), data=runs.classes)
    given: dict[str, Any] = {
        "data_collator": lambda rows: with_images(counts),
        "remove_unused_columns": False,
        "eval_strategy": "epoch",
    }
    expected = run(make(case, tmp_path, **given))
    ours = make(case, tmp_path, with_us=True, options=options, **given)
    refusal = r"rows such as .* have none on their own|rows of the batch do not agree: .*'shared'"
    with pytest.raises((LossAverageError, BatchError), match=refusal):
        ours.train()
    assert ours.state.global_step == 0
    whole = {**options, **EVERY_BATCH_WHOLE, "batch_layout": {"images": "shared"}}
    found = run(make(case, tmp_path, with_us=True, options=whole, **given))
    assert all(map(torch.equal, found[0], expected[0]))
    assert found[1:] == expected[1:]


def test_a_row_that_cannot_be_computed_alone_leaves_the_question_to_the_whole_batch(
    tmp_path: Path,
) -> None:
    class Paired(runs.Own):
        """Two rows at least, as a normalisation over rows needs them: a sum over items."""

        def forward(
            self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any
        ) -> dict[str, Tensor]:
            if len(input_ids) < 2:
                raise ValueError("one row has no pair")
            found = super().forward(input_ids, labels)
            rows = len(input_ids)
            return {**found, "loss": found["loss"] * rows / kwargs.get("num_items_in_batch", rows)}

    case = Case(model=Paired, data=runs.classes)
    options = {"microbatch_size": 4, "eval_microbatch_size": 4, "probe": False}
    plain = run(make(case, tmp_path, dtype=torch.float64))
    ours = make(case, tmp_path, dtype=torch.float64, with_us=True, options=options)
    found = run(ours)
    assert ours.automicro.last.loss_average_is == "declared"  # a sum
    assert furthest(found[0], plain[0]) < 1e-12
    ours = make(case, tmp_path, with_us=True, options=options)
    with MemoryBudget("200KiB"), pytest.raises(LossError, match="cannot be split, because one row"):
        ours.train()


class MeanOfTokens(Trainer):
    """A mean over targets that nobody can read off, where rows have different numbers of them."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


def test_a_mean_that_nobody_knows_is_looked_at_and_refused(tmp_path: Path) -> None:
    ours = make(CASES["causal"], tmp_path, with_us=True, kind=MeanOfTokens)
    with pytest.raises(LossAverageError, match="splitting changes this batch"):
        ours.train()


class SumOfTokens(MeanOfTokens):
    """Divided by the items of a step; a mean where there is none, as of what is evaluated."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if num_items_in_batch is None:
            return super().compute_loss(model, inputs)
        outputs = {"logits": model(input_ids=inputs["input_ids"]).logits}
        return runs.sum_over_items(outputs, inputs["labels"], num_items_in_batch)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)), None, None


def test_a_mean_that_is_evaluated_is_refused_or_declared(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": SumOfTokens, "eval_strategy": "epoch"}
    ours = make(CASES["accumulation 4"], tmp_path, with_us=True, **options)
    with pytest.raises(LossAverageError, match="splitting changes this batch"):
        ours.evaluate()
    declared = {"loss_average": "tokens"}
    plain = make(CASES["accumulation 4"], tmp_path, **options)
    ours = make(CASES["accumulation 4"], tmp_path, with_us=True, options=declared, **options)
    assert all(map(torch.equal, run(ours)[0], run(plain)[0]))


def count_targets(batch: Any) -> Tensor:
    found: Tensor = (batch["labels"][:, 1:] != -100).sum()
    return found


def test_a_mean_that_was_declared_is_right(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"kind": MeanOfTokens, "dtype": torch.float64}
    plain = run(make(CASES["causal"], tmp_path, **kinds))
    options = {"loss_average": count_targets, "microbatch_size": 3}
    found = run(make(CASES["causal"], tmp_path, with_us=True, options=options, **kinds))
    assert furthest(found[0], plain[0]) < 1e-12


def test_what_would_be_wrong_is_refused_by_name(tmp_path: Path) -> None:
    ours = make(CASES["causal"], tmp_path, with_us=True)
    with pytest.raises(ValueError, match="enabled for this trainer already"):
        enable(ours)
    with pytest.raises(ValueError, match="auto_find_batch_size=True starts the training again"):
        make(CASES["causal"], tmp_path, with_us=True, auto_find_batch_size=True)
    with pytest.raises(TypeError, match="that is the trainer's to say"):
        make(CASES["causal"], tmp_path, with_us=True, options={"precision": "bf16"})
    with pytest.raises(TypeError, match=r"microbatch=….* is not known; give options of Micro"):
        make(CASES["causal"], tmp_path, with_us=True, options={"microbatch": 3})
    with pytest.raises(TypeError, match=r"takes a transformers.Trainer, not a Linear"):
        enable(nn.Linear(2, 2))


@pytest.mark.parametrize("inside", [False, True])
def test_losses_that_compare_rows_are_refused_with_the_remedy(inside: bool, tmp_path: Path) -> None:
    loss = type("CachedMultipleNegativesRankingLoss", (nn.Module,), {})()
    trainer = make(CASES["causal"], tmp_path)
    trainer.loss = nn.Sequential(loss) if inside else {"pairs": loss}
    with pytest.raises(ValueError, match=r"CachedMultiple.* compares .*automicro\.Contrastive"):
        enable(trainer)
    enable(trainer, microbatch_size=None)


def test_a_trainer_with_another_seam_is_refused_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "training_step", lambda self, model, inputs: None)
    with pytest.raises(ImportError, match=r"transformers .* lacks the parameter 'num_items_in_b"):
        make(CASES["causal"], tmp_path, with_us=True)


# Subclasses of others


class Mine(Trainer):
    """Calls a loss of its own: ``of(trainer, model, inputs)`` gives it and the outputs."""

    of: Any

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        loss, outputs = type(self).of(self, model, inputs)
        return (loss, outputs) if return_outputs else loss


def mine(of: Any) -> Any:
    return type("Mine", (Mine,), {"of": staticmethod(of)})


def logging_its_loss(trainer: Any, model: nn.Module, inputs: Any) -> Any:
    outputs = model(**inputs)
    trainer.log({"own": outputs["loss"].item()})
    return outputs["loss"], outputs


def changing_its_inputs(trainer: Any, model: nn.Module, inputs: Any) -> Any:
    inputs["input_ids"].add_(1).remainder_(runs.VOCABULARY)
    outputs = model(**inputs)
    return outputs["loss"], outputs


def drawing_in_python(trainer: Any, model: nn.Module, inputs: Any) -> Any:
    outputs = model(**inputs)
    return outputs["loss"] * random.random(), outputs


def with_a_penalty(trainer: Any, model: nn.Module, inputs: Any) -> Any:
    """Of the gradient by its inputs: needs a graph, also where it is only asked."""
    outputs = model(**inputs)
    weight = model.get_parameter("head.weight")
    rows = len(inputs["labels"])
    found = torch.autograd.grad(outputs["loss"] * rows, weight, create_graph=True)
    return outputs["loss"] + 0.0 * found[0].sum(), outputs


def by_attribute(trainer: Any, model: nn.Module, inputs: Any) -> Any:
    outputs = model(input_ids=inputs.input_ids, labels=inputs.labels)
    return outputs["loss"], outputs


def by_place(trainer: Any, model: nn.Module, inputs: Any) -> Any:
    outputs = model(*inputs)
    return outputs["loss"], outputs


def to_zero_at_first(trainer: Any, model: nn.Module, inputs: Any) -> Any:
    """A divergence that the first batch has none of."""
    outputs = model(**inputs)
    logits = outputs["logits"].log_softmax(-1)
    push = trainer.state.global_step * torch.tensor([0.1, 0.0, -0.1], dtype=logits.dtype)
    target = (logits.detach() + push).log_softmax(-1)
    return F.kl_div(logits, target, reduction="batchmean", log_target=True), outputs


def columns(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def encoded(rows: list[dict[str, Tensor]]) -> Any:
    return BatchEncoding(columns(rows))


def pair(rows: list[dict[str, Tensor]]) -> Any:
    found = columns(rows)
    return found["input_ids"], found["labels"]


@pytest.mark.parametrize(
    ("of", "collator"),
    [
        (logging_its_loss, columns),
        (changing_its_inputs, columns),
        (drawing_in_python, columns),
        (with_a_penalty, columns),
        (by_attribute, encoded),
        (by_place, pair),
        (to_zero_at_first, columns),
    ],
)
@pytest.mark.parametrize("options", [{}, {"microbatch_size": 3}])
def test_a_loss_of_a_subclass_is_as_without_us(
    of: Any, collator: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for with_us in (False, True):
        random.seed(0)
        case = Case(model=runs.Deaf, data=runs.classes)
        if of is drawing_in_python and options:
            return  # each microbatch draws a number of its own
        kinds: dict[str, Any] = {"kind": mine(of), "data_collator": collator}
        found.append(
            run(
                make(case, tmp_path, dtype=torch.float64, with_us=with_us, options=options, **kinds)
            )
            if with_us
            else run(make(case, tmp_path, dtype=torch.float64, **kinds))
        )
    plain, ours = found
    assert furthest(ours[0], plain[0]) <= (1e-12 if options else 0.0)
    assert ours[2] == plain[2]
    for row, other in zip(ours[1], plain[1], strict=True):
        assert row == pytest.approx(other, rel=1e-6 if options else 0.0)


class Scaled(Trainer):
    """A loss with a parameter of its own, that the optimizer steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Linear(3, 3, dtype=torch.float64)
        with torch.no_grad():
            self.scale.weight.copy_(torch.eye(3))

    def create_optimizer(self, *args: Any) -> Any:
        optimizer = super().create_optimizer(*args)
        optimizer.add_param_group({"params": list(self.scale.parameters())})
        return optimizer

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"])["logits"]
        return F.cross_entropy(self.scale(logits), inputs["labels"])


def test_parameters_of_a_loss_take_part(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"kind": Scaled, "dtype": torch.float64}
    plain = make(CASES["own module"], tmp_path, **kinds)
    ours = make(CASES["own module"], tmp_path, with_us=True, **kinds)
    with MemoryBudget("4GiB") as budget:
        plain.train()
    with MemoryBudget(budget.peak_bytes * 6 // 10):
        ours.train()
    assert ours.automicro.microbatch_size < 8
    assert torch.allclose(ours.scale.weight, plain.scale.weight, rtol=0, atol=1e-12)


class Stepping(Trainer):
    """A step of its own: ``after(trainer, model)`` is done behind the backward, and it counts."""

    after: Any = staticmethod(lambda trainer, model, loss: None)
    times = 0

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        self.times += 1
        type(self).after(self, model, loss)
        return loss


def add_noise(trainer: Any, model: nn.Module, loss: Tensor) -> None:
    for each in model.parameters():
        if each.grad is not None:
            each.grad.add_(0.01)


def attack(trainer: Any, model: nn.Module, loss: Tensor) -> None:
    weight = next(model.parameters())
    assert weight.grad is not None
    weight.data.add_(weight.grad / weight.grad.norm())


def clip(trainer: Any, model: nn.Module, loss: Tensor) -> None:
    trainer.accelerator.clip_grad_norm_(model.parameters(), 0.1)


def drop(trainer: Any, model: nn.Module, loss: Tensor) -> None:
    model.zero_grad()


class Again(Stepping):
    """A second backward of the batch, moved, as where a model is trained against an attack."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, inputs, *args, **kwargs)
        moved = {**inputs, "input_ids": inputs["input_ids"].roll(1, 0)}
        return (loss + super().training_step(model, moved, *args, **kwargs)) / 2


class Generating(Stepping):
    """Makes its batches in the step, of those of the loader, as trainers do that draw answers.

    Two steps share what is drawn: which of them runs is told by a count of the step's own.
    """

    drawn: Any = None

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        if not cast(nn.Module, self.model).training:
            return prepared
        if self.times % 2 == 0 or len(self.drawn[0]["labels"]) != len(prepared["labels"]):
            order = torch.randperm(len(prepared["labels"]))
            shuffled = {name: each[order] for name, each in prepared.items()}
            self.drawn = [shuffled, {**shuffled, "labels": shuffled["labels"].flip(0)}]
        return self.drawn[self.times % 2]


STEPPING = [
    *(type(f"Step_{f.__name__}", (Stepping,), {"after": staticmethod(f)})
      for f in (add_noise, attack, clip, drop)),
    Again, Generating,
]  # fmt: skip


@pytest.mark.parametrize("kind", STEPPING)
def test_what_a_step_does_around_the_trainers_own_is_done_once_a_batch(
    kind: Any, tmp_path: Path
) -> None:
    found = []
    for options in (None, {}, {"microbatch_size": 3}):
        kinds: dict[str, Any] = {"kind": kind, "dtype": torch.float64, "max_grad_norm": 0.0}
        with_us = options is not None
        trainer = make(CASES["classifier"], tmp_path, with_us=with_us, options=options, **kinds)
        found.append((run(trainer), trainer.times))
    (plain, times), (whole, _), (cut, _) = found
    assert [each for _, each in found] == [times] * 3
    assert all(map(torch.equal, whole[0], plain[0]))
    assert whole[1] == plain[1]
    assert furthest(cut[0], plain[0]) < 1e-12
    assert losses(cut[1]) == pytest.approx(losses(plain[1]), rel=1e-9)


class Alone(Trainer):
    """Calls the backward of the loss itself, and not accelerate's."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Any = self.compute_loss(model, inputs)
        loss.backward()
        found: Tensor = loss.detach()
        return found


class Copied(Trainer):
    """A step that is all its own, with accelerate's backward."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Any = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        found: Tensor = loss.detach()
        return found


@pytest.mark.parametrize("kind", [Alone, Copied])
def test_a_step_with_a_backward_of_its_own_is_refused(kind: Any, tmp_path: Path) -> None:
    ours = make(CASES["classifier"], tmp_path, with_us=True, kind=kind)
    with pytest.raises(LossError, match=r"training_step computes its loss itself, .* let it call"):
        ours.train()
    assert all(each.grad is None for each in ours.model.parameters())


class Switching(torch.optim.SGD):
    """As those without a schedule: training and evaluation have other parameters."""

    is_training = False

    def train(self) -> None:
        self._scale(1.01, True)

    def eval(self) -> None:
        self._scale(1 / 1.01, False)

    @torch.no_grad()
    def _scale(self, by: float, is_training: bool) -> None:
        if self.is_training != is_training:
            self.is_training = is_training
            for each in self.param_groups[0]["params"]:
                each.mul_(by)


def test_an_optimizer_that_switches_parameters_does_so_before_the_batch(tmp_path: Path) -> None:
    found = []
    for with_us in (False, True):
        ours = make(CASES["classifier"], tmp_path, with_us=with_us, eval_strategy="epoch")
        ours.optimizer = Switching(ours.model.parameters(), lr=0.1)
        found.append(run(ours))
    assert all(map(torch.equal, found[1][0], found[0][0]))
    assert found[1][1] == found[0][1]


def test_an_evaluation_after_one_without_labels_has_the_same_loss(tmp_path: Path) -> None:
    found = []
    for with_us in (False, True):
        options = {"eval_microbatch_size": 3}
        trainer = make(CASES["causal"], tmp_path, with_us=with_us, options=options)
        trainer.predict(runs.unlabelled(8))
        found.append(trainer.evaluate()["eval_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


class Odd(runs.Own):
    """Gives outputs that microbatches cannot give, in evaluation."""

    gives = "centred"

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        if not self.training:
            logits = found["logits"]
            found["odd"] = {
                "centred": logits - logits.mean(0),
                "similar": logits @ logits.T,
                "table": self.head.weight,
                "spread": logits.std(),
            }[self.gives]
        return found


@pytest.mark.filterwarnings("ignore:.*is a Tensor in each microbatch")
@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ("centred", "the output 'logits.1' of a row depends on the other rows"),
        ("similar", "the output 'logits.1' has the shape"),
        ("table", "'logits.1' has the shape .* for 8 rows, and .* joined from two parts"),
        ("spread", r"returns\['logits'\]\[1\] is .* as a whole and .* combined from 3"),
    ],
)
def test_outputs_that_microbatches_cannot_give_are_named(
    gives: str, said: str, tmp_path: Path
) -> None:
    options = {"eval_microbatch_size": 3}
    case = Case(model=Odd, data=runs.classes)
    trainer = make(case, tmp_path, dtype=torch.float64, with_us=True, options=options)
    trainer.model.gives = gives
    trainer.evaluate()  # of which nobody gets outputs, so that nothing is said
    trainer.evaluate()
    with pytest.warns(MetricWarning, match=said):
        trainer.predict(runs.classes(8))


def test_what_cannot_be_put_back_is_told_and_left(tmp_path: Path) -> None:
    held = peak_of(CASES["causal"], tmp_path) // 2
    ours = make(CASES["causal"], tmp_path, with_us=True)
    ours.places = {"next": iter(range(9))}
    said = r"Trainer.places\['next'\] .*: left as a failed attempt changed it"
    with MemoryBudget(held), pytest.warns(StateWarning, match=said):
        ours.train()


@pytest.mark.parametrize("train", [True, False])
def test_a_trainer_and_its_model_are_free_when_nobody_has_them(train: bool, tmp_path: Path) -> None:
    """Without waiting for the garbage collector, which knows nothing of a device's memory."""
    trainer = make(CASES["classifier"], tmp_path, with_us=True)
    model, held = weakref.ref(trainer.model), weakref.ref(trainer)
    gc.disable()
    try:
        if train:
            trainer.train()
        trainer.evaluate()
        del trainer
        assert held() is None
        assert model() is None
    finally:
        gc.enable()


def test_a_model_of_an_earlier_run_is_not_kept(tmp_path: Path) -> None:
    made: list[Any] = []

    def init() -> Any:
        made.append(weakref.ref(model := runs.bert(0.0)))
        return model

    class Alive(TrainerCallback):
        counts: ClassVar[list[int]] = []

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            gc.collect()
            self.counts.append(sum(each() is not None for each in made))

    arguments = make(CASES["classifier"], tmp_path).args
    trainer = Trainer(
        None, arguments, train_dataset=runs.classes(8), eval_dataset=runs.classes(8),
        model_init=init, callbacks=[Alive()],
    )  # fmt: skip
    enable(trainer)
    for _ in range(2):
        trainer.train()
        trainer.evaluate()
    assert set(Alive.counts) == {1}


# Batches without padding


def test_sequences_in_one_row_are_cut_between_sequences() -> None:
    batch: dict[str, Any] = {
        "input_ids": torch.arange(6)[None],
        "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1]]),
        "labels": torch.tensor([[-100, 1, 2, -100, -100, 5]]),
        "cu_seq_lens_q": torch.tensor([0, 3, 4, 6], dtype=torch.int32),
        "max_length_q": 3,
        "seq_idx": torch.tensor([[0, 0, 0, 1, 2, 2]], dtype=torch.int32),
    }
    read = Sequences.read(batch)
    assert read is not None
    assert read.num_rows == 3
    part = read.take(1, 3).flat()
    assert part["input_ids"].tolist() == [[3, 4, 5]]
    assert part["cu_seq_lens_q"].tolist() == [0, 1, 3]
    assert part["max_length_q"] == 2
    assert part["seq_idx"].tolist() == [[0, 1, 1]]
    whole = read.flat()
    assert all(
        torch.equal(whole[name], value) for name, value in batch.items() if name != "max_length_q"
    )


@pytest.mark.parametrize(
    "change",
    [{"labels": torch.tensor([[-100, 1, 2, 3, 4, 5]])}, {"attention_mask": torch.ones(1, 6)}],
)
def test_sequences_that_depend_on_each_other_stay_whole(change: dict[str, Tensor]) -> None:
    batch: dict[str, Any] = {
        "input_ids": torch.arange(6)[None],
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
        "labels": torch.tensor([[-100, 1, 2, -100, 4, 5]]),
    }
    assert Sequences.read(batch) is not None
    assert Sequences.read({**batch, **change}) is None


# Several ranks


ON_RANKS: list[Any] = [
    (name, accumulation, *parallel)
    for name in ("causal", "own module")
    for accumulation in (1, 2)
    for parallel in ((), ("fsdp2",))
]


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "how", [*ON_RANKS, *(pytest.param((name, 2), marks=_OF_TRL) for name in TRL)]
)
def test_one_rank_out_of_memory_leaves_both_where_the_wrapper_alone_ends(
    how: Any, tmp_path: Path
) -> None:
    """In gloo, with FSDP2 as on accelerators: elsewhere transformers falls back to DDP."""
    for found in torchrun("tests.integrations.transformers_ranks", tmp_path, *how):
        plain, ours = found["losses"]
        assert found["kind"].startswith("FSDP") == ("fsdp2" in how)
        assert found["microbatch_size"] == 4
        assert found["differs"] < (1e-6 if how[0] in TRL else 1e-12)
        assert ours == pytest.approx(plain, rel=1e-6)
        cut, whole = found["evaluations"]
        assert cut == pytest.approx(whole, rel=1e-6)


def test_fsdp2_that_keeps_gradients_back_is_refused(tmp_path: Path) -> None:
    trainer = make(CASES["accumulation 4"], tmp_path)
    trainer.accelerator.state.distributed_type = DistributedType.FSDP
    trainer.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=2)
    with pytest.raises(ValueError, match=r"gradients of FSDP2 back, .*'sync_each_batch': True"):
        enable(trainer)
    trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    enable(trainer)


# Scripts of other kinds


def small_bert(kind: Any, **options: Any) -> Any:
    def made(dropout: float) -> nn.Module:
        config = BertConfig(
            vocab_size=runs.VOCABULARY, hidden_size=32, num_hidden_layers=1,
            num_attention_heads=2, intermediate_size=32, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout, **options,
        )  # fmt: skip
        model: nn.Module = kind(config)
        return model

    return made


def spans(rows: int = runs.ROWS) -> list[dict[str, Tensor]]:
    return [
        {
            "input_ids": row["input_ids"],
            "start_positions": row["input_ids"][0] % runs.LENGTH,
            "end_positions": row["input_ids"][1] % runs.LENGTH,
        }
        for row in runs.tokens(rows)
    ]


def tagged(rows: int = runs.ROWS) -> list[dict[str, Tensor]]:
    return [
        {**row, "labels": torch.where(row["labels"] < 0, row["labels"], row["labels"] % 3)}
        for row in runs.tokens(rows)
    ]


def several(rows: int = runs.ROWS) -> list[dict[str, Tensor]]:
    return [
        {"input_ids": row["input_ids"], "labels": (row["input_ids"][:3] % 2).double()}
        for row in runs.tokens(rows)
    ]


def two_targets(rows: int = runs.ROWS) -> list[dict[str, Tensor]]:
    return [
        {
            "input_ids": row["input_ids"],
            "kind": row["input_ids"][0] % 3,
            "height": row["input_ids"].double().mean() / runs.VOCABULARY,
        }
        for row in runs.tokens(rows)
    ]


class TwoTargets(runs.Own):
    def forward(  # type: ignore[override]
        self, input_ids: Tensor, kind: Tensor, height: Tensor
    ) -> dict[str, Tensor]:
        logits = super().forward(input_ids)["logits"]
        loss = F.cross_entropy(logits, kind) + F.mse_loss(logits[:, 0], height)
        return {"loss": loss, "logits": logits}


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)


def weighted(trainer: Any, model: nn.Module, inputs: Any) -> Any:
    outputs = model(input_ids=inputs["input_ids"])
    labels = inputs["labels"].flatten()
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels, weight=CLASS_WEIGHTS), outputs


def count_weights(batch: Any) -> Tensor:
    return CLASS_WEIGHTS[batch["labels"][batch["labels"] >= 0]].sum()


class Distilling(Mine):
    """With a teacher beside the model, and a metric of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = runs.bert(0.0).double().eval()
        self.accuracy = MulticlassAccuracy(3, average="micro")

    @staticmethod
    def of(trainer: Any, model: nn.Module, inputs: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            taught = trainer.teacher(input_ids=inputs["input_ids"]).logits.softmax(-1)
        if model.training:
            trainer.accuracy.update(outputs.logits.detach(), inputs["labels"])
        loss = F.kl_div(outputs.logits.log_softmax(-1), taught, reduction="batchmean")
        return outputs.loss + loss, outputs


def metrics_of_inputs(prediction: Any) -> dict[str, float]:
    return {"ids": float(prediction.inputs.mean()), "losses": float(prediction.losses.mean())}


class Steering(TrainerCallback):
    """Changes what the trainer does next."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = state.global_step == 3
        control.should_epoch_stop = state.global_step == 5
        control.should_training_stop = state.global_step == 8


SCRIPTS: dict[str, tuple[Case, dict[str, Any]]] = {
    "question answering": (Case(model=small_bert(BertForQuestionAnswering), data=spans), {}),
    "weighted tags": (
        Case(model=small_bert(BertForTokenClassification, num_labels=3), data=tagged),
        {"kind": mine(weighted), "options": {"loss_average": count_weights}},
    ),
    "several labels": (
        Case(
            model=small_bert(
                BertForSequenceClassification,
                num_labels=3,
                problem_type="multi_label_classification",
            ),
            data=several,
        ),
        {},
    ),
    "label_names": (
        Case(model=TwoTargets, data=two_targets, arguments={"label_names": ["kind", "height"]}),
        {},
    ),
    "distillation": (Case(model=runs.bert, data=runs.classes), {"kind": Distilling}),
    "metrics of inputs": (
        Case(model=runs.bert, data=runs.classes),
        {"include_for_metrics": ["inputs", "loss"], "compute_metrics": metrics_of_inputs},
    ),
    "noise, SGD, control": (
        Case(arguments={"neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 2}),
        {
            "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
            "callbacks": [Steering()],
        },
    ),
}


def count_cuts(trainer: Any) -> list[int]:
    """How many microbatches each batch is cut into, from now on."""
    counts: list[int] = []
    step = trainer.training_step

    def counted(*args: Any) -> Tensor:
        loss: Tensor = step(*args)
        counts.append(trainer.automicro.last.num_microbatches)
        return loss

    trainer.training_step = counted
    return counts


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_of_other_kinds_are_as_without_us(name: str, tmp_path: Path) -> None:
    case, given = SCRIPTS[name]
    given = {"eval_strategy": "epoch", **given}
    declared = given.pop("options", {})
    plain = make(case, tmp_path, dtype=torch.float64, **given)
    with MemoryBudget("4GiB") as budget:
        expected = run(plain)
    for options, held in (({"microbatch_size": 3}, 2 * budget.peak_bytes), ({}, budget.peak_bytes)):
        options = {**declared, **options}
        ours = make(case, tmp_path, dtype=torch.float64, with_us=True, options=options, **given)
        with MemoryBudget(held * 8 // 10):
            cuts = count_cuts(ours)
            found = run(ours)
        assert max(cuts) > 1
        assert furthest(found[0], expected[0]) < 1e-10  # AdamW enlarges gradients that are 0
        assert found[2] == expected[2]
        for row, other in zip(found[1], expected[1], strict=True):
            assert row == pytest.approx(other, rel=1e-6)
        if name == "distillation":
            counted = [int((each.accuracy.tp + each.accuracy.fn).sum()) for each in (plain, ours)]
            assert counted == [2 * runs.ROWS] * 2


@pytest.mark.parametrize("size", [30, "auto"])
def test_rows_that_are_sorted_by_tokens_train_and_are_predicted_as_by_the_trainer(
    tmp_path: Path, size: int | str
) -> None:
    def collate(rows: list[list[int]]) -> dict[str, torch.Tensor]:
        padded = max(map(len, rows)) + 2
        ids = torch.tensor([row + [0] * (padded - len(row)) for row in rows])
        mask = (torch.arange(padded) < torch.tensor(list(map(len, rows)))[:, None]).long()
        labels = torch.where(mask == 1, ids % 3, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    data = [[1 + (row + 3 * at) % 19 for at in range(n)] for row, n in enumerate([9, 3, 12, 5] * 4)]
    found = []
    for with_us in (False, True):
        torch.manual_seed(0)
        config: Any = BertConfig(  # type: ignore[call-arg]
            vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=8, num_labels=3, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=8, per_device_eval_batch_size=8, max_steps=2,
            use_cpu=True, report_to=[], save_strategy="no", optim="sgd", learning_rate=0.5,
        )  # fmt: skip
        trainer: Any = Trainer(
            BertForTokenClassification(config).double(), arguments, train_dataset=data,
            eval_dataset=data, data_collator=collate,
        )  # fmt: skip
        if with_us:
            sizes = {"microbatch_size": size, "eval_microbatch_size": size}
            enable(trainer, microbatch_unit="tokens", loss_average="tokens", **sizes)
        trainer.train()
        found.append((trainer.predict(data), trainer.model.state_dict()))
        if with_us:
            assert trainer.automicro.last.num_microbatches > 1
    (one, weights), (other, others) = found
    assert all(torch.allclose(weights[name], others[name], atol=1e-9) for name in weights)
    length = other.label_ids.shape[1]
    assert (one.label_ids[:, :length] == other.label_ids).all()
    real = other.label_ids != -100
    assert other.predictions[real] == pytest.approx(one.predictions[:, :length][real], abs=1e-9)


def test_the_tail_of_a_language_model_has_a_size_of_its_own(tmp_path: Path) -> None:
    plain = run(make(CASES["causal"], tmp_path, dtype=torch.float64))
    options = {"microbatch_size": 4, "nested": {"tail": 2}}
    ours = make(CASES["causal"], tmp_path, dtype=torch.float64, with_us=True, options=options)
    found = run(ours)
    assert furthest(found[0], plain[0]) < 1e-6  # transformers' loss is one of float32
    assert losses(found[1]) == pytest.approx(losses(plain[1]), rel=1e-6)
    assert found[2] == plain[2]
    assert max(vars(ours.model)["forward"].split.sizes) == 2
