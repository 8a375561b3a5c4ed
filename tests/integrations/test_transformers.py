"""The Trainer of Hugging Face with one line: identical without a limit, correct within one."""

import functools
import gc
import inspect
import itertools
import json
import random
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
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
    BertForTokenClassification,
    Seq2SeqTrainer,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import logging

from automicro import (
    BatchError,
    LossAverageError,
    LossError,
    MemoryBudget,
    MetricWarning,
    StateWarning,
)
from automicro.batch.layout import BatchLayout
from automicro.integrations.transformers import Sequences, enable
from tests.integrations import transformers_runs as runs
from tests.integrations.both import (
    Ran,
    Run,
    at_any_limit,
    check_rows,
    in_less_memory,
    max_diff,
    on_ranks,
    with_and_without,
)
from tests.integrations.transformers_ranks import compare_on_ranks
from tests.integrations.transformers_runs import CASES, Case, logged, losses, make, run, timeless
from tests.ranks.world import world_of

SIZES = {"microbatch_size": 3, "eval_microbatch_size": 3}
# Before transformers 5.16, a smoothed loss is no mean over a step's items and sums in fp32.
COUNTS_SMOOTHED = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
# peft accesses a renamed attribute of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated")


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    logging.set_verbosity_error()
    yield
    capsys.readouterr()


TRL = ("SFT", "DPO", "Reward")
_OF_TRL = (
    pytest.mark.filterwarnings("ignore"),  # warnings of TRL, which change with each version
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),
)
_OF_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")


def of_trl(*names: str, more: Sequence[Any] = ()) -> list[Any]:
    return [pytest.param(name, marks=[*_OF_TRL, *more]) for name in names]


@pytest.fixture
def running(tmp_path: Path) -> Any:
    """Make runs of a trainer, without automicro or with its options."""

    def running(case: Case | str, **how: Any) -> Run:
        def train(options: Mapping[str, Any] | None) -> Ran:
            return run(make(case, tmp_path, with_us=options is not None, options=options, **how))

        return train

    return running


def trainer_of(name: str, folder: Path, **how: Any) -> Any:
    return make(CASES.get(name, name), folder, **how)


def long(name: str) -> dict[str, Any]:
    """Return arguments for rows whose activations dominate the memory of a TRL step."""
    if name in CASES:
        return {}
    return {"words": (60, 100), "max_length": None if "padding" in name else 112}


def peak_of(case: Case | str, folder: Path, **arguments: Any) -> int:
    with MemoryBudget("4GiB") as budget:
        make(case, folder, **arguments).train()
    return budget.peak_bytes


# Results compared with the trainer alone


IN_FLOAT64 = {"dtype": torch.float64}, 1e-6, 2e-6
HALVES: list[Any] = [
    ("causal", {}, 1e-3, 1e-6), ("causal", {"bf16": True}, 1.0, 1e-3), ("causal", *IN_FLOAT64),
    *(pytest.param(name, *IN_FLOAT64, marks=_OF_TRL) for name in (*TRL, "SFT, without padding")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "how", "close", "logged"), HALVES)
def test_run_in_half_memory_matches_trainer(
    name: str, how: dict[str, Any], close: float, logged: float, running: Any
) -> None:
    """TRL accumulates the head gradient of SFT and DPO in fp32 for every cut."""
    plain, ours = in_less_memory(running(CASES.get(name, name), **how, **long(name)))
    assert ours.trainer.automicro.microbatch_size < 8
    is_exact = "dtype" in how and name in ("causal", "Reward")
    assert max_diff(ours.parameters, plain.parameters) < (1e-12 if is_exact else close)
    assert losses(ours.logged) == pytest.approx(losses(plain.logged), rel=logged)
    assert ours.logged[-2].get("num_tokens") == plain.logged[-2].get("num_tokens")
    assert ours.events == plain.events


@pytest.mark.parametrize(
    "name", ["causal", *of_trl(*TRL, more=[pytest.mark.sweep, pytest.mark.timeout(600)])]
)
def test_run_at_any_limit_matches_or_raises_sample_too_large(name: str, running: Any) -> None:
    how = {"dtype": torch.float64, "num_train_epochs": 1, **long(name)}
    how |= {} if name in CASES else {"rows": 12}
    close = 1e-6 if name in ("SFT", "DPO") else 1e-12
    at_any_limit(running(CASES.get(name, name), **how), close=close)


@pytest.mark.parametrize(
    ("name", "options"),
    [("causal", {}), *(pytest.param(*each, {"microbatch_size": 3}, marks=marks)
                       for each, marks in ((("causal",), ()), (("SFT",), _OF_TRL)))],
)  # fmt: skip
def test_fp16_loss_scale_matches_trainer(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Emulate fp16: the scale grows and overflows, and one step is skipped."""
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
    assert max_diff(ours.parameters, plain.parameters) <= (1e-5 if options else 0.0)
    # Gradient norms overflow here and are not compared.
    told = [[row["loss"] for row in ran.logged if "loss" in row] for ran in (ours, plain)]
    assert told[0] == pytest.approx(told[1], rel=1e-6)


# Evaluation


def mean_of_logits(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"mean": float(logits.mean()), "rows": float(len(labels))}


class SummingMetric:
    """A metric for ``batch_eval_metrics``, called with each batch and read at the last one."""

    def __init__(self) -> None:
        self.total, self.calls = 0.0, 0

    def __call__(self, prediction: Any, compute_result: bool = False) -> dict[str, float]:
        self.total += float(prediction.predictions.sum())
        self.calls += 1
        return {"total": self.total, "calls": self.calls}


@pytest.mark.parametrize("name", ["causal", "classifier", *of_trl(*TRL)])
def test_evaluation_below_peak_memory_has_same_metrics(name: str, tmp_path: Path) -> None:
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


def generating() -> Any:
    from transformers import Seq2SeqTrainingArguments

    arguments = Seq2SeqTrainingArguments(
        output_dir=tempfile.gettempdir(), per_device_eval_batch_size=8, predict_with_generate=True,
        generation_max_length=9, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return Seq2SeqTrainer(runs.t5(0.0).double(), arguments), runs.tokens(20)


def classifying(rows: Any, **how: Any) -> Any:
    case = Case(model=runs.bert, data=rows)
    return make(case, Path(tempfile.gettempdir()), dtype=torch.float64, **how), rows(20)


@pytest.mark.parametrize(
    "made",
    [
        generating,
        lambda: classifying(runs.unlabeled),
        lambda: classifying(runs.classes, batch_eval_metrics=True, compute_metrics=SummingMetric()),
    ],
    ids=["generated tokens", "without labels", "metrics by batch"],
)
def test_predictions_match_trainer(made: Any) -> None:
    found = []
    for with_us in (False, True):
        trainer, rows = made()
        if with_us:
            enable(trainer, eval_microbatch_size=3)
        found.append(trainer.predict(rows))
    plain, ours = found
    assert ours.predictions == pytest.approx(plain.predictions, abs=1e-14)
    assert (ours.label_ids is None) == (plain.label_ids is None)
    assert plain.label_ids is None or (ours.label_ids == plain.label_ids).all()
    check_rows([timeless(ours.metrics)], [timeless(plain.metrics)])


# Resuming


class Stop(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.at


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("name", ["causal", *of_trl("SFT")])
def test_resumed_run_matches_uninterrupted_run_bitwise(
    name: str, first: bool, then: bool, tmp_path: Path
) -> None:
    """The checkpoint may come from the plain trainer, and may be resumed by it."""
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


def test_sizes_are_saved_in_trainer_state(tmp_path: Path) -> None:
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
    """Interrupt the fourth training step after a given number of forwards."""
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


def test_interrupt_restores_trainer_and_training_works_again(tmp_path: Path) -> None:
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
    assert max_diff(found[0], expected[0]) < 1e-12
    ours.automicro.disable()
    assert ours.training_step.__func__ is Trainer.training_step
    assert ours.automicro is None
    enable(ours)


# Warnings and errors


EVERY_BATCH_WHOLE = {"microbatch_size": None, "eval_microbatch_size": None}


def test_partly_divided_loss_is_rejected_with_working_remedy(
    tmp_path: Path,
) -> None:
    case = Case(model=runs.TwoLosses, data=runs.classes, arguments={"eval_strategy": "epoch"})
    refusal = r"only in part: one row has .* auxiliary.* eval_microbatch_size=None"
    # If only evaluation is split, the first evaluation raises.
    for options, steps in (({}, 0), ({"microbatch_size": 3}, 0), ({"microbatch_size": None}, 6)):
        ours = make(case, tmp_path, with_us=True, options=options)
        with pytest.raises(ValueError, match=refusal):
            ours.train()
        assert ours.state.global_step == steps
    ours = make(case, tmp_path, with_us=True, options=EVERY_BATCH_WHOLE)
    found, expected = run(ours), run(make(case, tmp_path))
    assert all(map(torch.equal, found[0], expected[0]))
    assert found[1:3] == expected[1:3]


class Declared(nn.Module):
    """A model whose batches have rows in the dimension that `batch_layout` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(
        self, x: Tensor, labels: Tensor, prior: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        logits = self.head(self.body(x.to(self.head.weight.dtype))[0].mean(0))
        if prior is not None:
            logits = logits + prior.log()
        items = kwargs.get("num_items_in_batch")
        summed = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return {"loss": summed / (len(logits) if items is None else items), "logits": logits}


class DeclaredMean(Declared):
    """The same model without `num_items_in_batch`: a mean over its rows."""

    def forward(  # type: ignore[override]
        self, x: Tensor, labels: Tensor, prior: Tensor | None = None
    ) -> dict[str, Tensor]:
        return super().forward(x, labels, prior)


def collated(
    rows: list[dict[str, Tensor]], *, every: bool = False, prior: int = 0
) -> dict[str, Tensor]:
    """Collate time-first batches, with all rows in dimension 1 or with a shared table."""
    ids = torch.stack([row["input_ids"] for row in rows], 1)
    labels = torch.stack([row["labels"] for row in rows])
    batch = {"x": F.one_hot(ids % 4, 4).float(), "labels": labels[None] if every else labels}
    return {**batch, "prior": torch.full((prior,), 1 / 3)} if prior else batch


LAYOUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "rows in dimension 1 everywhere": ({"every": True}, 1),
    "a table beside them": ({"prior": 3}, {"x": 1, "prior": "shared"}),
}


def declared(name: str, model: Any, length: int) -> Case:
    """Return a case of one of these layouts with a given number of time steps."""
    form, layout = LAYOUTS[name]

    def short(*_: int) -> list[dict[str, Tensor]]:
        return [{**row, "input_ids": row["input_ids"][:length]} for row in runs.classes(20)]

    arguments = {
        "data_collator": functools.partial(collated, **form), "remove_unused_columns": False,
        "eval_strategy": "epoch", "prediction_loss_only": True, "num_train_epochs": 1,
    }  # fmt: skip
    return Case(
        model=lambda dropout: model(), data=short, arguments=arguments,
        options={"batch_layout": layout},
    )  # fmt: skip


class Images(nn.Module):
    """Replace image tokens by features of all images of the batch, as VLMs do."""

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


def with_images(counts: list[int]) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (len(counts), 5), generator=drawn)
    for row, count in enumerate(counts):
        ids[row, :count] = 9
    images = torch.randn(sum(counts), 6, generator=drawn)
    return {"input_ids": ids, "images": images, "labels": torch.arange(len(counts)) % 3}


UNEVEN: dict[str, tuple[list[int], dict[str, Any]]] = {
    "images equal rows by chance": ([2, 2, 0, 2, 0, 2, 0, 0], {}),
    "declared as shared": ([2, 1, 0, 1], {"batch_layout": {"images": "shared"}}),
    "more than rows": ([2, 1, 0, 2], {}),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_unevenly_shared_tensor_is_rejected_unless_batches_stay_whole(
    name: str, tmp_path: Path
) -> None:
    counts, options = UNEVEN[name]
    case = Case(model=lambda dropout: Images(), data=runs.classes)
    given: dict[str, Any] = {
        "data_collator": lambda rows: with_images(counts),
        "remove_unused_columns": False,
        "eval_strategy": "epoch",
    }
    expected = run(make(case, tmp_path, **given))
    ours = make(case, tmp_path, with_us=True, options=options, **given)
    refusal = r"of one row cannot be computed alone|rows of the batch do not agree: .*'shared'"
    with pytest.raises((LossError, BatchError), match=refusal):
        ours.train()
    assert ours.state.global_step == 0
    whole = {**options, **EVERY_BATCH_WHOLE, "batch_layout": {"images": "shared"}}
    found = run(make(case, tmp_path, with_us=True, options=whole, **given))
    assert all(map(torch.equal, found[0], expected[0]))
    assert found[1:3] == expected[1:3]


class MeanOfTokens(Trainer):
    """An undeclared mean over targets, whose number varies between rows."""

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


def test_undeclared_token_mean_is_rejected(tmp_path: Path) -> None:
    ours = make(CASES["causal"], tmp_path, with_us=True, kind=MeanOfTokens)
    with pytest.raises(LossAverageError, match="splitting changes this batch"):
        ours.train()


class SumOfTokens(MeanOfTokens):
    """A sum divided by the items of a step, or a mean in evaluation."""

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


def test_evaluation_mean_must_be_declared(tmp_path: Path) -> None:
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


def test_unsupported_setups_are_rejected(tmp_path: Path) -> None:
    ours = make(CASES["causal"], tmp_path, with_us=True)
    with pytest.raises(ValueError, match="enabled for this trainer already"):
        enable(ours)
    with pytest.raises(ValueError, match="auto_find_batch_size=True restarts the training"):
        make(CASES["causal"], tmp_path, with_us=True, auto_find_batch_size=True)
    with pytest.raises(TypeError, match="is set by the trainer"):
        make(CASES["causal"], tmp_path, with_us=True, options={"precision": "bf16"})
    with pytest.raises(TypeError, match=r"microbatch=….* is not known: pass options of Micro"):
        make(CASES["causal"], tmp_path, with_us=True, options={"microbatch": 3})
    with pytest.raises(TypeError, match=r"takes a transformers.Trainer, not a Linear"):
        enable(nn.Linear(2, 2))


@pytest.mark.parametrize("inside", [False, True])
def test_row_comparing_loss_is_rejected_with_remedy(inside: bool, tmp_path: Path) -> None:
    loss = type("CachedMultipleNegativesRankingLoss", (nn.Module,), {})()
    trainer = make(CASES["causal"], tmp_path)
    trainer.loss = nn.Sequential(loss) if inside else {"pairs": loss}
    with pytest.raises(ValueError, match=r"CachedMultiple.* compares .*automicro\.Contrastive"):
        enable(trainer)
    enable(trainer, microbatch_size=None)


def test_missing_host_method_error_names_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "training_step", lambda self, model, inputs: None)
    with pytest.raises(ImportError, match=r"transformers .* lacks the parameter 'num_items_in_b"):
        make(CASES["causal"], tmp_path, with_us=True)


# User-defined subclasses


class WithLoss(Trainer):
    """Call a user-defined loss: ``of(trainer, model, inputs)`` returns it and the outputs."""

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


def with_loss(of: Any) -> Any:
    return type("WithLoss", (WithLoss,), {"of": staticmethod(of)})


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
    """Add a penalty on a gradient, which needs a graph even in evaluation."""
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
    """A divergence that is zero for the first batch."""
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


class Scaled(Trainer):
    """A trainer whose loss has its own parameter, which the optimizer steps."""

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
        outputs = model(input_ids=inputs["input_ids"])
        loss = F.cross_entropy(self.scale(outputs["logits"].double()), inputs["labels"])
        return (loss, outputs) if args or kwargs.get("return_outputs") else loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        found = super().train(*args, **kwargs)
        self.log({"scale": float(self.scale.weight.detach().square().sum())})
        return found


class Stepping(Trainer):
    """Count steps, and call ``after(trainer, model, loss)`` after each backward."""

    after: Any = staticmethod(lambda trainer, model, loss: None)
    times = 0

    def train(self, *args: Any, **kwargs: Any) -> Any:
        found = super().train(*args, **kwargs)
        self.log({"times": self.times})
        return found

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        self.times += 1
        type(self).after(self, model, loss)
        return loss


def clip_and_add_noise(trainer: Any, model: nn.Module, loss: Tensor) -> None:
    trainer.accelerator.clip_grad_norm_(model.parameters(), 0.1)
    for each in model.parameters():
        if each.grad is not None:
            each.grad.add_(0.01)


class Again(Stepping):
    """Run a second backward on shifted inputs, as in adversarial training."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, inputs, *args, **kwargs)
        moved = {**inputs, "input_ids": inputs["input_ids"].roll(1, 0)}
        return (loss + super().training_step(model, moved, *args, **kwargs)) / 2


class Generating(Stepping):
    """Build batches in the step from those of the loader, like trainers that draw answers.

    Two steps share the drawn batches; a counter in the step selects one of them.
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


class Clipping(Stepping):
    after = staticmethod(clip_and_add_noise)


STEPPING = [Clipping, Again, Generating]


class DirectBackward(Trainer):
    """Call the backward of the loss directly instead of that of accelerate."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Any = self.compute_loss(model, inputs)
        loss.backward()
        found: Tensor = loss.detach()
        return found


class CopiedStep(Trainer):
    """Replace the whole step, with the backward of accelerate."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Any = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        found: Tensor = loss.detach()
        return found


@pytest.mark.parametrize("kind", [DirectBackward, CopiedStep])
def test_step_with_own_backward_is_rejected(kind: Any, tmp_path: Path) -> None:
    ours = make(CASES["classifier"], tmp_path, with_us=True, kind=kind)
    with pytest.raises(LossError, match=r"training_step computes its loss itself, .* Let it call"):
        ours.train()
    assert all(each.grad is None for each in ours.model.parameters())


class ScheduleFree(torch.optim.SGD):
    """Use different parameters in training and evaluation, as schedule-free optimizers do."""

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


def test_evaluation_after_unlabeled_prediction_has_same_loss(tmp_path: Path) -> None:
    found = []
    for with_us in (False, True):
        options = {"eval_microbatch_size": 3}
        trainer = make(CASES["causal"], tmp_path, with_us=with_us, options=options)
        trainer.predict(runs.unlabeled(8))
        found.append(trainer.evaluate()["eval_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


class OddOutputs(runs.Own):
    """Return evaluation outputs that microbatches cannot reproduce."""

    gives = "centered"

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        if not self.training:
            logits = found["logits"]
            odd = {"centered": logits - logits.mean(0), "table": self.head.weight}
            found["odd"] = odd[self.gives]
        return found


@pytest.mark.filterwarnings("ignore:.*is a Tensor in each microbatch")
@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ("centered", "the output 'logits.1' of a row depends on the other rows"),
        ("table", "'logits.1' has the shape .* for 8 rows, and .* joined from two parts"),
    ],
)
def test_outputs_that_microbatches_cannot_reproduce_warn(
    gives: str, said: str, tmp_path: Path
) -> None:
    options = {"eval_microbatch_size": 3}
    case = Case(model=OddOutputs, data=runs.classes)
    trainer = make(case, tmp_path, dtype=torch.float64, with_us=True, options=options)
    trainer.model.gives = gives
    trainer.evaluate()  # nothing returns these outputs, so there is no warning
    with pytest.warns(MetricWarning, match=said):
        trainer.predict(runs.classes(8))


def test_unrestorable_state_warns_and_is_left_changed(tmp_path: Path) -> None:
    held = peak_of(CASES["causal"], tmp_path) // 2
    ours = make(CASES["causal"], tmp_path, with_us=True)
    ours.places = {"next": iter(range(9))}
    said = r"Trainer.places\['next'\] .*: left as a failed attempt changed it"
    with MemoryBudget(held), pytest.warns(StateWarning, match=said):
        ours.train()


@pytest.mark.parametrize("train", [True, False])
def test_trainer_memory_is_freed_when_unreferenced(train: bool, tmp_path: Path) -> None:
    """Do not rely on the garbage collector, which ignores device memory."""
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


def test_model_of_earlier_run_is_released(tmp_path: Path) -> None:
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


# Padding-free batches


def test_packed_sequences_are_split_between_sequences() -> None:
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
    assert BatchLayout(0).num_rows(read) == 3
    part = BatchLayout(0).split(read, [1, 2])[1].flat()
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
def test_dependent_sequences_stay_whole(change: dict[str, Tensor]) -> None:
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
def test_two_ranks_match_wrapper_when_one_runs_out_of_memory(how: Any, tmp_path: Path) -> None:
    """Use gloo with the FSDP2 setup for accelerators; otherwise transformers falls back to DDP."""
    with world_of(2) as world:
        results = world.run(on_ranks, compare_on_ranks, str(tmp_path), *how)
    for found in results:
        plain, ours = found["losses"]
        assert found["kind"].startswith("FSDP") == ("fsdp2" in how)
        assert found["microbatch_size"] == 4
        assert found["differs"] < (1e-6 if how[0] in TRL else 1e-12)
        assert ours == pytest.approx(plain, rel=1e-6)
        cut, whole = found["evaluations"]
        assert cut == pytest.approx(whole, rel=1e-6)


def test_fsdp2_without_sync_each_batch_is_rejected(tmp_path: Path) -> None:
    trainer = make(CASES["accumulation 4"], tmp_path)
    trainer.accelerator.state.distributed_type = DistributedType.FSDP
    trainer.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=2)
    with pytest.raises(ValueError, match=r"FSDP2 holds back .*'sync_each_batch': True"):
        enable(trainer)
    trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    enable(trainer)


# Other kinds of scripts


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


class Distilling(WithLoss):
    """Use a teacher model and a user-defined metric."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model: Any = self.model
        self.teacher = runs.bert(0.0).to(model.dtype).eval()
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

    def train(self, *args: Any, **kwargs: Any) -> Any:
        found = super().train(*args, **kwargs)
        accuracy: Any = self.accuracy
        self.log({"counted": int((accuracy.tp + accuracy.fn).sum())})
        return found


def metrics_of_inputs(prediction: Any) -> dict[str, float]:
    return {"ids": float(prediction.inputs.mean()), "losses": float(prediction.losses.mean())}


class Steering(TrainerCallback):
    """Change the next actions of the trainer."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = state.global_step == 3
        control.should_epoch_stop = state.global_step == 5
        control.should_training_stop = state.global_step == 8


def case_of(kind: Any = Trainer, options: Any = None, **arguments: Any) -> Case:
    """Return a case of a classifier."""
    return Case(
        model=runs.bert, data=runs.classes, kind=kind, options=options or {}, arguments=arguments
    )


def of_loss(of: Any, collator: Any = columns) -> Case:
    return Case(
        model=runs.IgnoresItems,
        data=runs.classes,
        kind=with_loss(of),
        arguments={"data_collator": collator},
    )


EVERY_CASE: dict[str, Case] = {
    **CASES,
    **{each.__name__: case_of(each, max_grad_norm=0.0) for each in STEPPING},
    **{f"a layout, {name}": declared(name, *how) for name, how in zip(
        LAYOUTS, [(DeclaredMean, 8), (Declared, 5)], strict=True
    )},
    **{of.__name__: of_loss(of) for of in (
        logging_its_loss, changing_its_inputs, drawing_in_python, with_a_penalty, to_zero_at_first
    )},
    "declared mean": Case(kind=MeanOfTokens, options={"loss_average": count_targets}),
    "schedule-free optimizer": case_of(
        optimizer_cls_and_kwargs=(ScheduleFree, {"lr": 0.1}), eval_strategy="epoch"
    ),
    "batches with attributes": of_loss(by_attribute, encoded),
    "pair batches": of_loss(by_place, pair),
    "loss with parameters": Case(model=runs.Own, data=runs.classes, kind=Scaled),
    "question answering": Case(model=small_bert(BertForQuestionAnswering), data=spans),
    "weighted tags": Case(
        model=small_bert(BertForTokenClassification, num_labels=3), data=tagged,
        kind=with_loss(weighted), options={"loss_average": count_weights},
    ),
    "label_names": Case(
        model=TwoTargets, data=two_targets, arguments={"label_names": ["kind", "height"]}
    ),
    "distillation": case_of(Distilling, eval_strategy="epoch"),
    "metrics of inputs": case_of(
        include_for_metrics=["inputs", "loss"], compute_metrics=metrics_of_inputs,
        eval_strategy="epoch",
    ),
    "noise, SGD, control": Case(arguments={
        "neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 2, "eval_strategy": "epoch",
        "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        "callbacks": [Steering()],
    }),
}  # fmt: skip
# Each microbatch would draw its own random numbers.
WHOLE = {"drawing_in_python"}
WIDE = {"label_names", "weighted tags"}  # targets or weights in float64
EVERY = [pytest.param(name, marks=[_OF_PEFT] * (name == "frozen base")) for name in EVERY_CASE]
IN_PIECES = [each for each in EVERY if each.values[0] not in WHOLE]


@pytest.mark.parametrize("name", [*EVERY, *of_trl(*runs.OF_TRL)])
def test_run_without_limit_matches_trainer_bitwise(name: str, running: Any) -> None:
    dtype = torch.float64 if name in WIDE else torch.float32
    with_and_without(running(EVERY_CASE.get(name, name), dropout=0.1, dtype=dtype))


@pytest.mark.parametrize("name", [*IN_PIECES, *of_trl(*runs.OF_TRL)])
def test_microbatched_run_matches_trainer_up_to_rounding(name: str, running: Any) -> None:
    """TRL computes log probabilities in fp32 for every model dtype."""
    case, is_rounded = EVERY_CASE.get(name, name), "smoothing" in name and not COUNTS_SMOOTHED
    is_exact = name in CASES or name == "Reward"
    # AdamW amplifies gradients near 0.
    close = 1e-6 if is_rounded else 1e-12 if is_exact else 1e-10 if name in EVERY_CASE else 1e-7
    plain, ours = with_and_without(running(case, dtype=torch.float64), SIZES, close=close)
    assert ours.trainer.automicro.last.num_microbatches > 1
    if name in (*CASES, *runs.OF_TRL):
        check_rows([timeless(ours.trainer.evaluate())], [timeless(plain.trainer.evaluate())])


def ragged(rows: int = 16) -> list[list[int]]:
    lengths = [(9, 3, 12, 5)[row % 4] for row in range(rows)]
    return [[1 + (row + 3 * at) % 19 for at in range(n)] for row, n in enumerate(lengths)]


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    length = max(map(len, rows)) + 2
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = (torch.arange(length) < torch.tensor(list(map(len, rows)))[:, None]).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.where(mask == 1, ids % 3, -100),
    }


@pytest.mark.parametrize("size", [30, "auto"])
def test_token_sorted_rows_match_trainer(running: Any, size: int | str) -> None:
    case = Case(
        model=small_bert(BertForTokenClassification, num_labels=3),
        data=ragged,
        arguments={"data_collator": padded, "optim": "sgd", "learning_rate": 0.5},
        options={"microbatch_unit": "tokens", "loss_average": "tokens"},
    )
    sizes = {"microbatch_size": size, "eval_microbatch_size": size}
    plain, ours = with_and_without(running(case, dtype=torch.float64), sizes, close=1e-9)
    assert ours.trainer.automicro.last.num_microbatches > 1
    one, other = (each.trainer.predict(ragged(16)) for each in (plain, ours))
    length = other.label_ids.shape[1]
    assert (one.label_ids[:, :length] == other.label_ids).all()
    real = other.label_ids != -100
    assert other.predictions[real] == pytest.approx(one.predictions[:, :length][real], abs=1e-9)


def test_language_model_tail_uses_own_size(tmp_path: Path) -> None:
    plain = run(make(CASES["causal"], tmp_path, dtype=torch.float64))
    options = {"microbatch_size": 4, "nested": {"tail": 2}}
    ours = make(CASES["causal"], tmp_path, dtype=torch.float64, with_us=True, options=options)
    found = run(ours)
    assert max_diff(found[0], plain[0]) < 1e-6  # the loss of transformers is float32
    assert losses(found[1]) == pytest.approx(losses(plain[1]), rel=1e-6)
    assert found[2] == plain[2]
    assert max(vars(ours.model)["forward"].split.sizes) == 2
