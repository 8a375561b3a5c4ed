"""The Trainer of Hugging Face with one line: identical without a limit, correct within one."""

import gc
import inspect
import json
import tempfile
import weakref
from collections.abc import Callable, Iterator
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
from transformers import (
    BatchEncoding,
    BertForTokenClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import logging

from automicro import BatchError, LossAverageError, LossError, MemoryBudget, MetricWarning
from automicro.batch.layout import BatchLayout
from automicro.integrations.transformers import Sequences, enable
from tests.integrations import transformers_runs as runs
from tests.integrations.hosts import HostTests, Ran, check, check_rows, on_ranks
from tests.integrations.told_transformers import HOST
from tests.integrations.transformers_runs import Rows, classes, compare_on_ranks, make, run, tokens
from tests.ranks.world import world_of

# Before transformers 5.16, a smoothed loss is no mean over a step's items and sums in fp32.
COUNTS_SMOOTHED = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
UNUSED = Path(tempfile.gettempdir())
# peft accesses a renamed attribute of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated")


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    logging.set_verbosity_error()
    yield
    capsys.readouterr()


# Models, losses and steps of users


def peft_gpt2(dropout: float) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    how: dict[str, Any] = {"task_type": "CAUSAL_LM", "fan_in_fan_out": True}
    config = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=dropout, **how)
    model: nn.Module = get_peft_model(runs.gpt2(dropout), config)
    return model


def sum_over_items(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    summed = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    loss: Tensor = summed / num_items_in_batch
    return loss


def mean_of_rows(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs["logits"], labels)


class TwoLosses(runs.Own):
    """Divide one loss by the number of items and add a second, undivided one."""

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        total = found["loss"] * len(input_ids) / kwargs["num_items_in_batch"]
        return {**found, "loss": total + 0.01 * found["logits"].square().mean()}


class TimeFirst(nn.Module):
    """A model whose rows are in dimension 1, next to a table that all rows share."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor, prior: Tensor, **kwargs: Any) -> Any:
        logits = self.head(self.body(x.to(self.head.weight.dtype))[0].mean(0)) + prior.log()
        items = kwargs.get("num_items_in_batch")
        summed = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": summed / (len(logits) if items is None else items), "logits": logits}


def columns(rows: Rows) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def time_first(rows: Rows) -> dict[str, Tensor]:
    found = columns(rows)
    x = F.one_hot(found["input_ids"][:, :5].T % 4, 4).float()
    return {"x": x, "labels": found["labels"], "prior": torch.full((3,), 1 / 3)}


def encoded(rows: Rows) -> Any:
    return BatchEncoding(columns(rows))


def pair(rows: Rows) -> Any:
    return tuple(columns(rows).values())


class WithLoss(Trainer):
    """Call a user-defined loss: ``of(trainer, model, inputs)`` returns it and the outputs."""

    of: Any

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = type(self).of(self, model, inputs)
        return (loss, outputs) if return_outputs else loss


def changing_its_inputs(trainer: Any, model: nn.Module, inputs: Any) -> Any:
    inputs["input_ids"].add_(1).remainder_(runs.VOCABULARY)
    outputs = model(**inputs)
    return outputs["loss"], outputs


def with_a_penalty(trainer: Any, model: nn.Module, inputs: Any) -> Any:
    """Add a penalty on a gradient, which needs a graph."""
    outputs, weight = model(**inputs), model.get_parameter("head.weight")
    if not torch.is_grad_enabled():
        return outputs["loss"], outputs
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


def mean_of_tokens(trainer: Any, model: nn.Module, inputs: Any) -> Any:
    outputs = model(input_ids=inputs["input_ids"])
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, inputs["labels"][:, 1:].flatten()), outputs


def count_targets(batch: Any) -> Tensor:
    found: Tensor = (batch["labels"][:, 1:] != -100).sum()
    return found


def with_loss(of: Any) -> Any:
    return type("WithLoss", (WithLoss,), {"of": staticmethod(of)})


def of_loss(of: Any, collator: Any = columns) -> dict[str, Any]:
    model = {"model": runs.IgnoresItems, "data": classes, "kind": with_loss(of)}
    return {**model, "data_collator": collator}


class Scaled(Trainer):
    """A trainer whose loss has its own parameter, which the optimizer steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Linear(3, 3, dtype=torch.float64)
        nn.init.eye_(self.scale.weight)

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


class Clipping(Trainer):
    """Clip gradients and add noise after each backward, and count steps."""

    times = 0

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        self.times += 1
        self.accelerator.clip_grad_norm_(model.parameters(), 0.1)
        for each in model.parameters():
            if each.grad is not None:
                each.grad.add_(0.001 * self.times)
        return loss


class Again(Trainer):
    """Run a second backward on shifted inputs, as in adversarial training."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, inputs, *args, **kwargs)
        moved = {**inputs, "input_ids": inputs["input_ids"].roll(1, 0)}
        return (loss + super().training_step(model, moved, *args, **kwargs)) / 2


class Generating(Clipping):
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


class CopiedStep(Trainer):
    """Replace the whole step, with the backward of accelerate or of the loss."""

    is_direct = False

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Any = self.compute_loss(model, inputs)
        (torch.Tensor.backward if self.is_direct else self.accelerator.backward)(loss)
        found: Tensor = loss.detach()
        return found


class DirectBackward(CopiedStep):
    is_direct = True


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


def metrics_of_inputs(prediction: Any) -> dict[str, float]:
    found = {"ids": prediction.inputs, "losses": prediction.losses, "logits": prediction[0][0]}
    return {name: float(each.mean()) for name, each in found.items()}


# Runs


class Scales(TrainerCallback):
    """Log the fp16 loss scale after each step, on a device without fp16."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=2)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.log_history.append({"loss_scale": self.scaler.get_scale()})


def comparing(inside: bool) -> Callable[[], Any]:
    def wrong() -> None:
        loss = type("CachedMultipleNegativesRankingLoss", (nn.Module,), {})()
        trainer = make(UNUSED)
        trainer.loss = nn.Sequential(loss) if inside else {"pairs": loss}
        assert enable(trainer, microbatch_size=None).automicro
        trainer.automicro.disable()
        enable(trainer)

    return wrong


def holding_back() -> None:
    trainer = make(UNUSED, gradient_accumulation_steps=4)
    trainer.accelerator.state.distributed_type = DistributedType.FSDP
    trainer.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=2)
    trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    enable(trainer).automicro.disable()
    trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = False
    enable(trainer)


def training(kind: Any, **case: Any) -> Callable[[], Any]:
    return lambda: make(UNUSED, {}, kind=kind, **case).train()


STEPS: dict[str, Any] = {"model": runs.bert, "data": classes}
PARTS = {"gradient_accumulation_steps": 4}
OWN_BACKWARD = r"training_step computes its loss itself, .* Let it call"


class TestTransformers(HostTests):
    CASES: ClassVar = {
        "accumulation": {
            **PARTS, "max_grad_norm": 0.05, "warmup_steps": 2, "lr_scheduler_type": "cosine",
        },
        "smoothing, accumulation": {**PARTS, "label_smoothing_factor": 0.1},
        "encoder-decoder": {"model": runs.t5},
        "classifier": {
            **STEPS, "include_for_metrics": ["inputs", "loss"], "eval_strategy": "epoch",
            "compute_metrics": metrics_of_inputs,
        },
        "own module": {**PARTS, "model": runs.Own, "data": classes},
        "ignores num_items": {**PARTS, "model": runs.IgnoresItems, "data": classes},
        "loss function, a sum": {
            "gradient_accumulation_steps": 2, "compute_loss_func": sum_over_items,
        },
        "loss function, a mean": {
            "model": runs.Own, "data": classes, "compute_loss_func": mean_of_rows,
        },
        **({"frozen base": {"model": peft_gpt2}} if find_spec("peft") else {}),
        **{each.__name__: {**STEPS, "kind": each, "max_grad_norm": 0.0}
           for each in (Clipping, Again, Generating)},
        "a layout": {
            "model": TimeFirst, "data": classes, "data_collator": time_first,
            "remove_unused_columns": False, "prediction_loss_only": True,
            "declared": {"batch_layout": {"x": 1, "prior": "shared"}},
        },
        **{of.__name__: of_loss(of)
           for of in (changing_its_inputs, with_a_penalty, to_zero_at_first)},
        "batches with attributes": of_loss(by_attribute, encoded),
        "pair batches": {**of_loss(by_place, pair), "evaluates": False},
        "declared mean": {
            "kind": with_loss(mean_of_tokens), "declared": {"loss_average": count_targets},
        },
        "schedule-free optimizer": {
            **STEPS, "optimizer_cls_and_kwargs": (ScheduleFree, {"lr": 0.1}),
            "eval_strategy": "epoch",
        },
        "loss with parameters": {"model": runs.Own, "data": classes, "kind": Scaled},
        "noise": {"neftune_noise_alpha": 5.0, "optim": "sgd", "learning_rate": 0.05},
    }  # fmt: skip
    TOLERANCES: ClassVar = {
        "smoothing, accumulation": 1e-12 if COUNTS_SMOOTHED else 1e-6,
        # AdamW amplifies gradients near 0.
        **dict.fromkeys(("Clipping", "Again", "Generating", "a layout", "noise"), 1e-10),
        **dict.fromkeys(("changing_its_inputs", "with_a_penalty", "to_zero_at_first"), 1e-10),
        **dict.fromkeys(("batches with attributes", "pair batches", "declared mean"), 1e-10),
        **dict.fromkeys(("schedule-free optimizer", "loss with parameters"), 1e-10),
    }
    MIXED = (({"bf16": True}, 1e-3),)
    LIMITED: ClassVar = {"num_train_epochs": 1}
    FP16: ClassVar = {"scales": Scales}
    MISSING = (
        (
            Trainer, "training_step", lambda self, model, inputs: None,
            r"transformers .* lacks the parameter 'num_items_in_b",
        ),
    )  # fmt: skip
    TOLD = HOST
    REFUSED = (
        (lambda: enable(make(UNUSED, {})), ValueError, "enabled for this trainer already"),
        (lambda: make(UNUSED, {}, auto_find_batch_size=True), ValueError, "restarts the training"),
        (lambda: make(UNUSED, {"precision": "bf16"}), TypeError, "is set by the trainer"),
        (lambda: make(UNUSED, {"microbatch": 3}), TypeError, "is not known: pass options of Micro"),
        (lambda: enable(nn.Linear(2, 2)), TypeError, "takes a transformers.Trainer, not a Linear"),
        (comparing(False), ValueError, r"CachedMultiple.* compares .*automicro\.Contrastive"),
        (comparing(True), ValueError, r"CachedMultiple.* compares .*automicro\.Contrastive"),
        (holding_back, ValueError, "FSDP2 holds back .*'sync_each_batch': True"),
        (training(with_loss(mean_of_tokens)), LossAverageError, "splitting changes this batch"),
        (training(CopiedStep, **STEPS), LossError, OWN_BACKWARD),
        (training(DirectBackward, **STEPS), LossError, OWN_BACKWARD),
    )

    def run(
        self, folder: Path, options: Any, *, scales: Any = None, evaluates: bool = True, **case: Any
    ) -> Ran:
        trainer = make(folder, options, **case)
        if scales is not None:
            trainer.add_callback(callback := scales())
            trainer.accelerator.scaler = callback.scaler
        return run(trainer, evaluates=evaluates)

    def resumed(self, folder: Path, first: bool, second: bool) -> Ran:
        return runs.resumed(make, folder, first, second)


# Evaluation


class SummingMetric:
    """A metric for ``batch_eval_metrics``, called with each batch and read at the last one."""

    def __init__(self) -> None:
        self.total, self.calls = 0.0, 0

    def __call__(self, prediction: Any, compute_result: bool = False) -> dict[str, float]:
        self.total += float(prediction.predictions.sum())
        self.calls += 1
        return {"total": self.total, "calls": self.calls}


def generating() -> Any:
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(UNUSED), per_device_eval_batch_size=8, predict_with_generate=True,
        generation_max_length=9, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return Seq2SeqTrainer(runs.t5(0.0).double(), arguments), tokens(20)


def classifying(rows: Any, **how: Any) -> Any:
    return make(UNUSED, model=runs.bert, data=rows, dtype=torch.float64, **how), rows(20)


@pytest.mark.parametrize(
    "made",
    [
        generating,
        lambda: classifying(runs.unlabeled),
        lambda: classifying(classes, batch_eval_metrics=True, compute_metrics=SummingMetric()),
    ],
    ids=["generated tokens", "without labels", "metrics by batch"],
)
def test_predictions_match_trainer(made: Any) -> None:
    (alone, rows), (trainer, _) = made(), made()
    enable(trainer, eval_microbatch_size=3)
    plain, ours = alone.predict(rows), trainer.predict(rows)
    assert ours.predictions == pytest.approx(plain.predictions, abs=1e-14)
    assert (ours.label_ids is None) == (plain.label_ids is None)
    assert plain.label_ids is None or (ours.label_ids == plain.label_ids).all()
    check_rows([runs.timeless(ours.metrics)], [runs.timeless(plain.metrics)])


def test_evaluation_after_unlabeled_prediction_has_same_loss() -> None:
    found = []
    for options in (None, {"eval_microbatch_size": 3}):
        trainer = make(UNUSED, options)
        trainer.predict(runs.unlabeled(8))
        found.append(trainer.evaluate()["eval_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


class OddOutputs(runs.Own):
    """Return evaluation outputs that microbatches cannot reproduce."""

    gives = "centered"

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        logits = found["logits"]
        odd = {"centered": logits - logits.mean(0), "table": self.head.weight}
        return found if self.training else {**found, "odd": odd[self.gives]}


@pytest.mark.filterwarnings("ignore:.*is a Tensor in each microbatch")
@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ("centered", "the output 'logits.1' of a row depends on the other rows"),
        ("table", "'logits.1' has the shape .* for 8 rows, and .* joined from two parts"),
    ],
)
def test_outputs_that_microbatches_cannot_reproduce_warn(gives: str, said: str) -> None:
    case: dict[str, Any] = {"model": OddOutputs, "data": classes, "dtype": torch.float64}
    trainer = make(UNUSED, {"eval_microbatch_size": 3}, **case)
    trainer.model.gives = gives
    trainer.evaluate()  # nothing returns these outputs, so there is no warning
    with pytest.warns(MetricWarning, match=said):
        trainer.predict(classes(8))


# Sizes, the end of a run, and memory


def test_sizes_are_saved_in_trainer_state(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    with MemoryBudget("4GiB") as budget:
        make(tmp_path).train()
    with MemoryBudget(budget.peak_bytes // 2):
        first = make(tmp_path, {}, callbacks=[runs.Stop(4)], **saving)
        first.train()
    kept = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert "train" in kept["stateful_callbacks"]["Sizes"]["attributes"]["found"]
    failures: list[int] = []

    class Counting(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            failures.append(resumed.automicro.last.ooms)

    with MemoryBudget(budget.peak_bytes // 2):
        resumed = make(tmp_path, {}, callbacks=[Counting()], **saving)
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


def test_interrupt_restores_trainer_and_training_works_again() -> None:
    plain, ours = (make(UNUSED, e, dtype=torch.float64) for e in (None, {"microbatch_size": 3}))
    interrupt(plain, forwards=0)
    backward = ours.accelerator.backward
    interrupt(ours, forwards=1)
    assert ours.accelerator.backward == backward
    assert "train" not in vars(ours.model)
    check(run(ours), run(plain), close=1e-12)
    ours.automicro.disable()
    assert ours.training_step.__func__ is Trainer.training_step
    assert ours.automicro is None
    enable(ours)


def test_trainer_memory_is_freed_when_unreferenced() -> None:
    """Do not rely on the garbage collector, which ignores device memory."""
    trainer = make(UNUSED, {}, **STEPS)
    model, held = weakref.ref(trainer.model), weakref.ref(trainer)
    gc.disable()
    try:
        trainer.train()
        trainer.evaluate()
        del trainer
        assert held() is None
        assert model() is None
    finally:
        gc.enable()


def test_model_of_earlier_run_is_released() -> None:
    made: list[Any] = []
    counts: list[int] = []

    def init() -> Any:
        made.append(weakref.ref(model := runs.bert(0.0)))
        return model

    class Alive(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            gc.collect()
            counts.append(sum(each() is not None for each in made))

    data: Any = {"train_dataset": classes(8), "eval_dataset": classes(8)}
    trainer = Trainer(None, make(UNUSED).args, model_init=init, callbacks=[Alive()], **data)
    enable(trainer)
    for _ in range(2):
        trainer.train()
        trainer.evaluate()
    assert set(counts) == {1}


# Losses that batches must stay whole for


EVERY_BATCH_WHOLE = {"microbatch_size": None, "eval_microbatch_size": None}


def test_partly_divided_loss_is_rejected_with_working_remedy() -> None:
    case: dict[str, Any] = {"model": TwoLosses, "data": classes, "eval_strategy": "epoch"}
    refusal = r"only in part: one row has .* auxiliary.* eval_microbatch_size=None"
    # If only evaluation is split, the first evaluation raises.
    for options, steps in (({}, 0), ({"microbatch_size": None}, 6)):
        ours = make(UNUSED, options, **case)
        with pytest.raises(ValueError, match=refusal):
            ours.train()
        assert ours.state.global_step == steps
    check(run(make(UNUSED, EVERY_BATCH_WHOLE, **case)), run(make(UNUSED, **case)), close=0.0)


class Images(nn.Module):
    """Replace image tokens by features of all images of the batch, as VLMs do."""

    def __init__(self, dropout: float) -> None:
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


@pytest.mark.parametrize(
    "counts", [[2, 2, 0, 2, 0, 2, 0, 0], [2, 1, 0, 2]], ids=["as many as rows", "more than rows"]
)
def test_unevenly_shared_tensor_is_rejected_unless_batches_stay_whole(counts: list[int]) -> None:
    case: dict[str, Any] = {"model": Images, "data": classes, "remove_unused_columns": False}
    case |= {"data_collator": lambda rows: with_images(counts), "num_train_epochs": 1}
    ours = make(UNUSED, {}, **case)
    refusal = r"of one row cannot be computed alone|rows of the batch do not agree: .*'shared'"
    with pytest.raises((LossError, BatchError), match=refusal):
        ours.train()
    assert ours.state.global_step == 0
    whole = {**EVERY_BATCH_WHOLE, "batch_layout": {"images": "shared"}}
    check(run(make(UNUSED, whole, **case)), run(make(UNUSED, **case)), close=0.0)


# Packed, sorted and nested batches


PACKED: dict[str, Any] = {
    "input_ids": torch.arange(6)[None],
    "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1]]),
    "labels": torch.tensor([[-100, 1, 2, -100, -100, 5]]),
    "cu_seq_lens_q": torch.tensor([0, 3, 4, 6], dtype=torch.int32),
    "max_length_q": 3,
    "seq_idx": torch.tensor([[0, 0, 0, 1, 2, 2]], dtype=torch.int32),
}


def test_packed_sequences_are_split_between_sequences() -> None:
    read = Sequences.read(PACKED)
    assert read is not None
    part = BatchLayout(0).split(read, [1, 2])[1].flat()
    assert part["input_ids"].tolist() == [[3, 4, 5]]
    assert part["cu_seq_lens_q"].tolist() == [0, 1, 3]
    assert part["max_length_q"] == 2
    assert part["seq_idx"].tolist() == [[0, 1, 1]]
    whole = read.flat()
    assert all(torch.equal(torch.as_tensor(whole[k]), torch.as_tensor(PACKED[k])) for k in PACKED)


@pytest.mark.parametrize(
    "change",
    [{"labels": torch.tensor([[-100, 1, 2, 3, 4, 5]])}, {"attention_mask": torch.ones(1, 6)}],
)
def test_dependent_sequences_stay_whole(change: dict[str, Tensor]) -> None:
    batch = {name: PACKED[name] for name in ("input_ids", "position_ids", "labels")}
    assert Sequences.read(batch) is not None
    assert Sequences.read({**batch, **change}) is None


def ragged(rows: int = 16) -> list[list[int]]:
    lengths = [(9, 3, 12, 5)[row % 4] for row in range(rows)]
    return [[1 + (row + 3 * at) % 19 for at in range(n)] for row, n in enumerate(lengths)]


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    length = max(map(len, rows)) + 2
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = (torch.arange(length) < torch.tensor(list(map(len, rows)))[:, None]).long()
    labels = torch.where(mask == 1, ids % 3, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("size", [30, "auto"])
def test_token_sorted_rows_match_trainer(size: int | str) -> None:
    case: dict[str, Any] = {
        "model": lambda dropout: runs.bert(dropout, BertForTokenClassification), "data": ragged,
        "data_collator": padded, "optim": "sgd", "learning_rate": 0.5, "dtype": torch.float64,
    }  # fmt: skip
    options: dict[str, Any] = {"microbatch_unit": "tokens", "loss_average": "tokens"}
    options |= {"microbatch_size": size, "eval_microbatch_size": size}
    plain, ours = run(make(UNUSED, **case)), run(make(UNUSED, options, **case))
    check(ours, plain, close=1e-9)
    assert ours.microbatches > 1
    one, other = (each.host.predict(ragged(16)) for each in (plain, ours))
    length = other.label_ids.shape[1]
    assert (one.label_ids[:, :length] == other.label_ids).all()
    real = other.label_ids != -100
    assert other.predictions[real] == pytest.approx(one.predictions[:, :length][real], abs=1e-9)


def test_language_model_tail_uses_own_size() -> None:
    options = {"microbatch_size": 4, "nested": {"tail": 2}}
    plain, ours = (
        run(make(UNUSED, each, dtype=torch.float64), evaluates=False) for each in (None, options)
    )
    check(ours, plain, close=1e-6)  # the loss of transformers is float32
    assert max(vars(ours.host.model)["forward"].split.sizes) == 2


# Several ranks


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "data", "steps", "is_sharded"),
    [(runs.gpt2, tokens, 2, False), (runs.Own, classes, 1, True), (runs.gpt2, tokens, 2, True)],
)
def test_two_ranks_match_wrapper_when_one_runs_out_of_memory(
    model: Any, data: Any, steps: int, is_sharded: bool, tmp_path: Path
) -> None:
    case = {"model": model, "data": data, "gradient_accumulation_steps": steps}
    case |= {"folder": tmp_path, "is_sharded": is_sharded}
    with world_of(2) as world:
        results = world.run(on_ranks, compare_on_ranks, make, 4, **case)
    for found in results:
        assert found["kind"].startswith("FSDP") == is_sharded
        assert found["microbatch_size"] == 4
        assert found["gap"] < 1e-12
        check_rows(*found["logged"])
