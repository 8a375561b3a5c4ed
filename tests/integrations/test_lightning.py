"""The Lightning Trainer with one callback: identical without a limit, and correct within one."""

import functools
import gc
import logging
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
)

from automicro import (
    BatchError,
    LossAverageError,
    LossError,
    MemoryBudget,
    MetricWarning,
    Observing,
    RollbackError,
)
from automicro.integrations.lightning import AutoMicrobatch
from automicro.reach import Reach
from automicro.state.capture import capture
from automicro.step.results import StepResult
from tests.integrations import lightning_runs as runs
from tests.integrations.both import (
    at_any_limit,
    check,
    check_rows,
    in_less_memory,
    max_diff,
    with_and_without,
)
from tests.integrations.lightning_runs import fit
from tests.ranks.world import world_of

EVALUATIONS = ("validation_step", "test_step", "predict_step")
# Host warnings about data loaders and changes in torch.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{said}")
    for said in (
        "changes attributes or variables",  # these models record what they see in attributes
        *("LeafSpec", "does not have many workers", "smaller than the logging interval"),
        *("The value of", "litlogger", "exists and is not empty", "It is recommended to use"),
        *("You passed in a `val_dataloader`", "You defined a `validation_step`"),
        "You are using the `dataloader_iter`",
        *("callbacks used to create the checkpoint", "resuming from a checkpoint that ended"),
    )
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hide messages of the host about devices and loggers."""
    told = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [each.level for each in told]
    for each in told:
        each.setLevel(logging.ERROR)
    yield
    for each, level in zip(told, levels, strict=True):
        each.setLevel(level)


def running(folder: Path, **case: Any) -> Callable[[Any], runs.Run]:
    """Make runs of a module, without the callback or with its options."""

    def train(options: Any) -> runs.Run:
        own = case.get("more", list)()
        given = {name: each for name, each in case.items() if name != "more"}
        given |= {"train": case["train"]()} if "train" in case else {}
        line = [] if options is None else [AutoMicrobatch(**options)]
        return fit(folder / str(len(line)), [*line, *own], **given)

    return train


# Results without a limit


def scaled() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)


PLAIN_CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulation": {"accumulate_grad_batches": 4},
    "clipping": {"gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
    "float64": {"precision": "64-true", "dtype": torch.float64},
}


def check_events(ours: list[Any], plain: list[Any], same: Any) -> None:
    assert [name for name, _ in ours] == [name for name, _ in plain]
    for (name, given), (_, expected) in zip(ours, plain, strict=True):
        assert len(given) == len(expected), name
        assert all(map(same, given, expected)), name


@pytest.mark.parametrize("name", PLAIN_CASES)
def test_run_without_limit_matches_host_bitwise_with_events(name: str, tmp_path: Path) -> None:
    case = {"dropout": 0.1, "records": True, **PLAIN_CASES[name]}
    plain, ours = with_and_without(running(tmp_path, **case))
    assert plain.trainer.fit_loop.total_batch_idx + 1 >= 10
    check_events(ours.recorder.events, plain.recorder.events, torch.equal)
    assert all(map(torch.equal, ours.module.losses, plain.module.losses))
    assert ours.trainer.callback_metrics == plain.trainer.callback_metrics


@pytest.mark.parametrize("size", ["auto", 5])
def test_fp16_loss_scale_matches_host(size: Any, tmp_path: Path) -> None:
    found = []
    for name, line in (("plain", []), ("ours", [AutoMicrobatch(microbatch_size=size)])):
        run = fit(tmp_path / name, line, plugins=[scaled()], gradient_clip_val=1.0, max_epochs=2)
        found.append((run, run.trainer.precision_plugin.scaler.get_scale()))
    (plain, scale), (ours, own) = found
    assert own == scale > 2.0**10
    if size == "auto":
        check(ours, plain, close=0.0)
    else:
        check_rows(losses_of(ours), losses_of(plain), 1e-3)


def losses_of(run: runs.Run) -> list[dict[str, float]]:
    return [{name: row[name] for name in row if "loss" in name} for row in run.logged]


# Results with a limit


@pytest.mark.parametrize(
    ("name", "close"),
    [("default", 2e-6), ("accumulation", 1e-5), ("bf16", 1e-3), ("float64", 1e-12)],
)
def test_run_in_half_memory_matches_host(name: str, close: float, tmp_path: Path) -> None:
    plain, ours = in_less_memory(running(tmp_path, **PLAIN_CASES[name], max_epochs=1))
    check_rows(losses_of(ours), losses_of(plain), close)
    assert all(
        map(functools.partial(torch.allclose, rtol=close), ours.module.losses, plain.module.losses)
    )
    if name != "bf16":
        check(ours, plain, close=close, logged=3e-6)  # torchmetrics counts in float32


@pytest.mark.parametrize("parts", [1, 4])
def test_microbatched_run_has_same_events_and_gradients(parts: int, tmp_path: Path) -> None:
    case: dict[str, Any] = {**PLAIN_CASES["float64"], "records": True}
    case["accumulate_grad_batches"] = parts
    plain, ours = with_and_without(running(tmp_path, **case), {"microbatch_size": 5}, close=1e-12)
    check_events(ours.recorder.of_batches, plain.recorder.of_batches, torch.allclose)
    assert len(ours.module.losses) == len(plain.module.losses)
    assert ours.module.kept["hits"] == plain.module.kept["hits"]
    outputs = ours.module.kept["outputs"], plain.module.kept["outputs"]
    assert all(map(torch.allclose, *outputs))


class Failing(runs.Module):
    """From a given epoch on, run out of memory in the backward after its hooks have run."""

    first = 1

    def backward(self, loss: Tensor, *given: Any, **named: Any) -> None:
        super().backward(loss, *given, **named)
        if self.fails and self.rows > 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fails, self.rows = self.current_epoch >= self.first, len(batch[0])
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.hooks = getattr(self, "hooks", 0) + 1
        norms = [float(p.grad.norm()) for p in self.parameters() if p.grad is not None]
        self.log("norm", sum(norms), on_step=True)

    def on_before_backward(self, loss: Tensor) -> None:
        self.kept["outputs"].append(loss.detach())


class Plain(Failing):
    def backward(self, loss: Tensor, *given: Any, **named: Any) -> None:
        loss.backward()


@pytest.mark.filterwarnings("ignore:.*self.rows changed in each microbatch")
@pytest.mark.parametrize("parts", [1, 4])
def test_hooks_of_failed_attempts_are_rolled_back(parts: int, tmp_path: Path) -> None:
    case: dict[str, Any] = {**PLAIN_CASES["float64"], "records": True, "num_sanity_val_steps": 0}
    case["accumulate_grad_batches"] = parts
    make = functools.partial(Plain, dtype=torch.float64)
    plain = fit(tmp_path / "plain", make=make, **case)
    told: list[str] = []
    line = AutoMicrobatch(features=[Observing(lambda event, subject: told.append(event))])
    ours = fit(
        tmp_path / "ours", [line], make=functools.partial(Failing, dtype=torch.float64), **case
    )
    assert told.count("oom") >= 2
    check(ours, plain, close=1e-12)
    check_events(ours.recorder.of_batches, plain.recorder.of_batches, torch.allclose)
    assert ours.module.hooks == plain.module.hooks
    assert all(map(torch.allclose, ours.module.kept["outputs"], plain.module.kept["outputs"]))
    progress = [
        each.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict()
        for each in (ours, plain)
    ]
    assert progress[0] == progress[1]


class Wide(pl.LightningModule):
    """A model whose gradients dominate memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(256, 256)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_only_one_set_of_gradients_is_held(tmp_path: Path) -> None:
    peaks = []
    for line in ([], [AutoMicrobatch(microbatch_size=None, probe=False)]):
        trainer = runs.trainer_of(tmp_path, line, max_epochs=1, logger=False)
        rows: Any = DataLoader(torch.randn(16, 256), 4)  # type: ignore[arg-type]
        with MemoryBudget(None) as budget:
            trainer.fit(Wide(), rows)
        peaks.append(budget.peak_bytes)
    assert peaks[1] - peaks[0] < 256 * 256 * 4 / 2


@pytest.mark.timeout(300)
def test_run_at_any_limit_matches_or_raises_sample_too_large(tmp_path: Path) -> None:
    one = {"limit_train_batches": 1, "limit_val_batches": 1, "max_epochs": 1}
    case: dict[str, Any] = {**PLAIN_CASES["float64"], **one, "num_sanity_val_steps": 0}
    at_any_limit(running(tmp_path, **case), close=1e-12)


# Evaluation


class Evaluated(runs.Module):
    """Keep the outputs that evaluation hooks receive."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.outputs: list[Any] = []

    def on_validation_batch_end(self, outputs: Any, *rest: Any) -> None:
        self.outputs.append(outputs)


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_evaluation_below_peak_memory_matches_host(method: str, tmp_path: Path) -> None:
    def run(*callbacks: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = Evaluated()
        trainer = runs.trainer_of(tmp_path, callbacks)
        found = getattr(trainer, method)(module, runs.loader(rows=90, batch=64), **options)
        return module, found

    options = {} if method == "predict" else {"verbose": False}
    with MemoryBudget(None) as budget:
        plain, expected = run()
    with pytest.raises(torch.OutOfMemoryError), MemoryBudget(budget.peak_bytes * 6 // 10):
        run()
    line = AutoMicrobatch()
    with MemoryBudget(budget.peak_bytes * 6 // 10):
        ours, found = run(line)
    if method == "predict":
        assert len(found) == len(expected)
        for (outputs, rest), (its_outputs, its_rest) in zip(found, expected, strict=True):
            assert torch.allclose(outputs, its_outputs, rtol=1e-5, atol=1e-6)
            assert torch.equal(rest["labels"], its_rest["labels"])
        return
    assert found[0].keys() == expected[0].keys()
    assert found[0] == {k: pytest.approx(v, rel=1e-5) for k, v in expected[0].items()}
    assert ours.kept["hits"] == plain.kept["hits"]
    for one, other in zip(ours.outputs, plain.outputs, strict=True):
        assert one["rows"] == other["rows"]
        assert one["loss"] == pytest.approx(float(other["loss"]), rel=1e-6)
        assert torch.allclose(one["outputs"], other["outputs"], rtol=1e-5, atol=1e-6)


def test_train_mode_during_validation_is_kept() -> None:
    class Sampling(runs.Module):
        def on_validation_model_eval(self) -> None:
            self.train()

    torch.manual_seed(0)
    module = Sampling(dropout=0.5)
    found = []
    for callbacks in ([], [AutoMicrobatch()]):
        torch.manual_seed(1)
        trainer = runs.trainer_of(Path("unused"), callbacks, logger=False)
        found.append(trainer.validate(module, runs.loader(), verbose=False)[0]["val/loss"])
        assert module.net.training
    assert found[0] == found[1]


# Resuming


@pytest.mark.parametrize(("first", "second"), [(1, 1), (0, 1), (1, 0)])
def test_run_resumes_from_checkpoint_with_or_without_callback(
    first: int, second: int, tmp_path: Path
) -> None:
    def line(is_ours: int) -> list[Any]:
        return [AutoMicrobatch()] if is_ours else []

    def seeded(trainer: Any, module: Any, *batch: Any) -> None:
        torch.manual_seed(trainer.global_step)

    draws = pl.callbacks.LambdaCallback(on_train_batch_start=seeded)
    case: dict[str, Any] = {"dropout": 0.1, "accumulate_grad_batches": 2, "logger": False}

    def run(first: int, second: int) -> tuple[int, list[Tensor]]:
        half = fit(tmp_path, line(first), **case, max_steps=3)
        half.trainer.save_checkpoint(tmp_path / "half.ckpt")
        given = {**case, "ckpt_path": tmp_path / "half.ckpt"}
        whole = fit(tmp_path, [*line(second), draws], **given)
        return whole.trainer.global_step, whole.parameters

    draws = pl.callbacks.LambdaCallback(on_train_batch_start=seeded)
    steps, parameters = run(first, second)
    its_steps, its_parameters = run(0, 0)
    assert steps == its_steps > 3
    assert all(map(torch.equal, parameters, its_parameters))


@pytest.fixture
def collector_off() -> Iterator[None]:
    """Keep automatic garbage collection from changing which sizes fit."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collector_off")
def test_sizes_are_restored_from_checkpoints(tmp_path: Path) -> None:
    line = AutoMicrobatch(memory_limit="360KiB")
    ours = fit(tmp_path, [line], max_epochs=1)
    ours.trainer.save_checkpoint(tmp_path / "ours.ckpt")
    again = AutoMicrobatch(memory_limit="360KiB")
    told: list[Any] = []
    again.options["features"] = [Observing(lambda event, subject: told.append(event))]
    trainer = runs.trainer_of(tmp_path, [again], max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(runs.Module(), runs.loader(), ckpt_path=tmp_path / "ours.ckpt")
    assert told.count("attempt_start") > told.count("oom") == 0


def test_checkpoint_sizes_of_other_policy_are_ignored(tmp_path: Path) -> None:
    ours = fit(tmp_path, [AutoMicrobatch(microbatch_size=8)], max_epochs=1)
    ours.trainer.save_checkpoint(tmp_path / "ours.ckpt")
    line = AutoMicrobatch()
    fit(tmp_path, [line], max_epochs=2, ckpt_path=tmp_path / "ours.ckpt")
    assert line.result is not None


# Kinds of steps


class Skipping(runs.Module):
    """Skip every third batch after drawing random numbers and logging."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("noise", torch.rand(()), on_step=True)
        return None if batch_idx % 3 == 1 else loss


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
@pytest.mark.parametrize("parts", [1, 2])
def test_step_returning_none_is_skipped_as_in_host(parts: int, tmp_path: Path) -> None:
    case: dict[str, Any] = {"accumulate_grad_batches": parts}
    plain = fit(tmp_path / "plain", make=functools.partial(Skipping, dropout=0.1), **case)
    ours = fit(
        tmp_path / "ours", [AutoMicrobatch()], make=functools.partial(Skipping, dropout=0.1), **case
    )
    check(ours, plain, close=0.0)


def test_none_for_some_microbatches_raises(tmp_path: Path) -> None:
    line = AutoMicrobatch(microbatch_size=8)
    with pytest.raises(LossError, match="None for 8 of 32 rows"):
        fit(tmp_path, [line], make=Skipping, num_sanity_val_steps=0)


class Predicting(runs.Module):
    """Return outputs that microbatches cannot reproduce."""

    gives = "centered"

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        return {
            "centered": outputs - outputs.mean(0),
            "similar": outputs @ outputs.T,
            "spread": {"outputs": outputs, "spread": outputs.std()},
        }[self.gives]


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ("centered", "the output of a row depends on the other rows"),
        ("similar", "the shape|is a Tensor in each microbatch"),
        ("spread", r"returns\['spread'\] is .* as a whole and .* combined from 4"),
    ],
)
def test_predictions_that_microbatches_cannot_reproduce_warn(
    gives: str, said: str, tmp_path: Path
) -> None:
    module = Predicting()
    module.gives = gives
    line = AutoMicrobatch(eval_microbatch_size=3)
    with pytest.warns(MetricWarning, match=said):
        runs.trainer_of(tmp_path, [line]).predict(module, runs.loader(rows=10, batch=10))


class LogitMetric(runs.Module):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = BinaryAccuracy()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.accuracy.update(batch[0][:, 0], batch[1] > 0)
        self.log("accuracy", self.accuracy)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        """Skip the metrics that this step does not update."""


def test_metric_mistaking_logits_for_probabilities_warns_once(tmp_path: Path) -> None:
    case: dict[str, Any] = {"max_steps": 2, "limit_val_batches": 0}
    with pytest.warns(MetricWarning, match="BinaryAccuracy treats its numbers as prob") as told:
        fit(tmp_path, [AutoMicrobatch(microbatch_size=1)], make=LogitMetric, **case)
    assert sum("treats its numbers" in str(each.message) for each in told) == 1


class TokenMeans(pl.LightningModule):
    """A loss averaged over valid targets, whose number varies between rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch["x"], batch["labels"]
        loss = F.cross_entropy(self.net(x).flatten(0, 1), labels.flatten())
        self.log("loss", loss, on_step=True)
        self.log("again", loss.double(), on_step=True, batch_size=int((labels != -100).sum()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def token_batches() -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (16, 5), generator=drawn)
    for row in range(16):
        labels[row, 1 + row % 4 :] = -100
    return [{"x": torch.randn(16, 5, 6, generator=drawn), "labels": labels}] * 3


def tokens() -> Any:
    return DataLoader(token_batches(), batch_size=None)  # type: ignore[arg-type]


def test_logged_loss_uses_declared_token_average(tmp_path: Path) -> None:
    run = running(tmp_path, make=TokenMeans, train=tokens, max_epochs=1, limit_val_batches=0)
    with_and_without(run, {"microbatch_size": 3, "loss_average": "tokens"}, close=1e-6)


class Validating(TokenMeans):
    returns = False

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.training_step(batch, batch_idx)
        return loss if self.returns else None


@pytest.mark.parametrize("returns", [False, True])
def test_validation_token_mean_is_exact_or_warns(returns: bool, tmp_path: Path) -> None:
    module = Validating()
    module.returns = returns
    given: Any = DataLoader(token_batches()[:1], batch_size=None)  # type: ignore[arg-type]
    line = AutoMicrobatch(eval_microbatch_size=3, loss_average="tokens")
    (plain,) = runs.trainer_of(tmp_path).validate(module, given, verbose=False)
    trainer = runs.trainer_of(tmp_path, [line])
    if returns:
        (found,) = trainer.validate(module, given, verbose=False)
        assert found["loss_epoch"] == pytest.approx(plain["loss_epoch"], rel=1e-6)
        return
    with pytest.warns(MetricWarning, match=r"not means over rows: log\('loss'\) is"):
        trainer.validate(module, given, verbose=False)


class Small(pl.LightningModule):
    """A base for modules in the style of user code."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@dataclass
class Pair:
    x: Tensor
    y: Tensor
    name: str = "a batch"


class DataclassBatches(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch.x, batch.y), batch_idx)


class Combined(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = {name: F.cross_entropy(self.net(x), y) for name, (x, y) in batch.items()}
        self.log_dict(losses, on_step=True)
        return losses["one"] + 0.5 * losses["other"]


class Overriding(Small):
    """Override clipping, scheduling and stepping."""

    def configure_gradient_clipping(self, *given: Any, **named: Any) -> None:
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None
    ) -> None:
        if batch_idx % 2:
            self.log("of_closure", closure())  # no optimizer step
        else:
            optimizer.step(closure=closure)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Alternating(Small):
    """Train two parts alternately, with gradient noise."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)

    def on_after_backward(self) -> None:
        drawn = torch.Generator().manual_seed(self.global_step)
        for parameter in self.net[2].parameters():
            assert parameter.grad is not None
            noise = torch.randn(parameter.shape, generator=drawn, dtype=parameter.dtype)
            parameter.grad += 0.01 * noise


class Measured(Small):
    """Log the return values of metrics, and row counts."""

    def __init__(self) -> None:
        super().__init__()
        classes = {"accuracy": MulticlassAccuracy(3), "f1": MulticlassF1Score(3)}
        self.metrics = MetricCollection({**classes, "auroc": MulticlassAUROC(3)})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        self.log_dict(self.metrics(outputs, batch[1]), on_step=True, on_epoch=False)
        self.log("rows", len(batch[0]), on_step=True)
        return F.cross_entropy(outputs, batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("of_outputs", outputs["loss"])


def pairs() -> Any:
    (x, y) = runs.loader(torch.float64).dataset.tensors
    rows = [slice(at, at + runs.BATCH) for at in range(0, runs.ROWS, runs.BATCH)]
    return DataLoader([Pair(x[each], y[each]) for each in rows], batch_size=None)  # type: ignore[arg-type]


def combined() -> Any:
    one, other = runs.loader(torch.float64), runs.loader(torch.float64, rows=90)
    return CombinedLoader({"one": one, "other": other}, "max_size_cycle")


KINDS: dict[str, dict[str, Any]] = {
    "dataclass batches": {"make": DataclassBatches, "train": pairs},
    "custom clipping, schedule and step": {"make": Overriding},
    "alternating parts with noise": {"make": Alternating},
    "returned metric values": {"make": Measured},
    "weight averaging": {
        "more": lambda: [pl.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)]
    },
    "accumulation schedule": {
        "more": lambda: [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]
    },
    "learning rate monitor": {
        "make": Overriding, "more": lambda: [pl.callbacks.LearningRateMonitor("step")]
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets")
@pytest.mark.parametrize("name", KINDS)
def test_user_modules_match_host(name: str, tmp_path: Path) -> None:
    case = {"make": Small, "dtype": torch.float64, "precision": "64-true", **KINDS[name]}
    run = running(tmp_path, **case)
    plain, ours = with_and_without(run, {"microbatch_size": 5}, close=1e-12)
    assert ours.trainer.global_step == plain.trainer.global_step


def test_combined_loader_with_uneven_rows_is_rejected(tmp_path: Path) -> None:
    """The loaders form one batch, and their last batches have different row counts."""
    line = AutoMicrobatch(microbatch_size=5)
    with pytest.raises(BatchError, match="rows of the batch do not agree"):
        fit(tmp_path, [line], make=Combined, train=combined(), precision="64-true")
    assert isinstance(line.result, StepResult)
    assert line.result.num_samples == runs.BATCH


@pytest.mark.filterwarnings("ignore:You called `self.log.*needs to be floating")
class WritesParameters(Small):
    """Change parameters that the step uses in a hook before the backward."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            next(self.parameters()).mul_(0.9)


def test_parameter_writes_before_backward_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(RollbackError, match=r"on_before_zero_grad or .* writes to parameters"):
        fit(tmp_path, [AutoMicrobatch(microbatch_size=5)], make=WritesParameters)


def test_loss_that_is_not_row_mean_is_rejected(tmp_path: Path) -> None:
    line = AutoMicrobatch()
    with pytest.raises(LossAverageError):
        runs.trainer_of(tmp_path, [line]).fit(TokenMeans(), tokens())


# End of a run


def replaced_attributes(trainer: Any) -> dict[str, Any]:
    """Return the attributes that the callback replaces during a run."""
    return {
        **vars(trainer.fit_loop.epoch_loop.automatic_optimization),
        **vars(trainer.strategy),
    }


def test_interrupt_restores_host_and_second_fit_works(tmp_path: Path) -> None:
    class Interrupted(runs.Module):
        interrupts = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.interrupts and batch_idx == 2:
                raise KeyboardInterrupt
            return loss

    torch.manual_seed(0)
    module = Interrupted()
    line = AutoMicrobatch(microbatch_size=8)
    trainer = runs.trainer_of(tmp_path, [line], logger=False)
    held = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            trainer.fit(module, runs.loader())
    finally:
        signal.signal(signal.SIGINT, held)  # the host leaves the signal ignored
    assert len(module.losses) == 2  # the loss of the third batch was rolled back
    assert not {"_make_closure", *EVALUATIONS} & replaced_attributes(trainer).keys()
    assert not {"on_before_backward", "on_after_backward", "forward"} & vars(module).keys()
    assert line.microbatcher is None
    assert line.state_dict()
    module.interrupts = False
    again = runs.trainer_of(tmp_path, [line], logger=False)
    again.fit(module, runs.loader())
    assert again.global_step == 12
    assert line.microbatcher is None


def test_finished_run_leaves_no_references(tmp_path: Path) -> None:
    run = fit(tmp_path, [AutoMicrobatch()])  # the host keeps a reference to its module in callbacks
    assert (
        not {"_make_closure"} & vars(run.trainer.fit_loop.epoch_loop.automatic_optimization).keys()
    )
    assert not {*EVALUATIONS} & vars(run.trainer.strategy).keys()
    kept = weakref.ref(run.module)
    del run
    gc.collect()
    assert kept() is None


def test_nested_part_uses_own_size_and_is_restored(tmp_path: Path) -> None:
    sizes: list[list[int]] = []

    class Noting(Small):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            part: Any = self.net.__dict__.get("forward")
            if part is not None:
                sizes.append(part.nested.sizes)

    def run(folder: Path, *line: Any) -> Any:
        return fit(folder, list(line), precision="64-true", make=Noting, dtype=torch.float64)

    plain = run(tmp_path / "plain")
    ours = run(tmp_path / "ours", AutoMicrobatch(microbatch_size=6, nested={"net": 3}))
    assert max_diff(ours.parameters, plain.parameters) < 1e-12
    assert sizes
    assert all(max(each) <= 3 for each in sizes)
    assert "forward" not in vars(ours.module.net)


# Several ranks


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "parts"), [("ddp", 1), ("ddp", 2), ("uneven", 1), ("fsdp2", 1)])
def test_two_ranks_match_host_when_one_runs_out_of_memory(
    kind: str, parts: int, tmp_path: Path
) -> None:
    with world_of(2) as world:
        results = world.run(runs.compare_on_ranks, str(tmp_path), kind, parts)
    for found in results:
        assert found["ooms"] > 0
        assert found["parameters"] < 1e-6
        assert found["validated"] < 1e-5
        assert found["losses"] == found["its losses"]


# Rejected setups


class Manual(runs.Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Lbfgs(runs.Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Iterating(runs.Module):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


class TwoOptimizers(runs.Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.net[0], self.net[2])]


def with_strategy(name: str) -> Callable[..., Any]:
    def change(trainer: Any) -> None:
        trainer.strategy.__class__ = type(name, (type(trainer.strategy),), {})

    return change


def with_batch_size_finder(trainer: Any) -> None:
    trainer.callbacks.append(pl.callbacks.BatchSizeFinder())


@pytest.mark.parametrize(
    ("module", "change", "error", "says"),
    [
        (Manual, None, ValueError, "backward=self.manual_backward"),
        (Lbfgs, None, ValueError, "LBFGS runs a batch several times"),
        (Iterating, None, ValueError, r"Change it to training_step\(batch, batch_idx\)"),
        (TwoOptimizers, None, RuntimeError, "multiple optimizers"),  # rejected by the host
        (
            runs.Module,
            with_strategy("DeepSpeedStrategy"),
            ValueError,
            "DeepSpeedS.* its own gradients",
        ),
        (runs.Module, with_strategy("FSDPStrategy"), ValueError, "FSDPStrategy is FSDP1"),
        (
            runs.Module,
            with_batch_size_finder,
            ValueError,
            "BatchSizeFinder searches the largest batch",
        ),
    ],
)
def test_unsupported_setups_are_rejected(
    module: Any, change: Any, error: Any, says: str, tmp_path: Path
) -> None:
    line = AutoMicrobatch()
    trainer = runs.trainer_of(tmp_path, [line], logger=False)
    if change is not None:
        change(trainer)
    with pytest.raises(error, match=says):
        trainer.fit(module(), runs.loader())


def test_duplicate_callback_is_rejected(tmp_path: Path) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"twice|more than one"):
        fit(tmp_path, [AutoMicrobatch(), AutoMicrobatch()])


def test_invalid_options_are_rejected_at_construction() -> None:
    with pytest.raises(TypeError, match="is set by the trainer"):
        AutoMicrobatch(optimizer=None)
    with pytest.raises(TypeError, match=r"microbatchsize=….* is not known.*microbatch_size"):
        AutoMicrobatch(microbatchsize=3)


def test_missing_host_method_error_names_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = pl.loops.optimization.automatic._AutomaticOptimization
    monkeypatch.delattr(kind, "_make_closure")
    with pytest.raises(ImportError, match=r"lightning \d.*lacks .*_make_closure.*Use lightning 2"):
        fit(tmp_path, [AutoMicrobatch()])


def test_reach_and_capture_do_not_enter_trainer(tmp_path: Path) -> None:
    module, teacher = runs.Module(), nn.Linear(2, 2)
    trainer = runs.trainer_of(tmp_path, [pl.callbacks.LambdaCallback()])
    trainer.callbacks[0].teacher = teacher
    module.trainer = trainer
    assert all(each is not teacher for each in Reach({"module": module}).modules().values())
    captured = capture({"module": module})
    trainer.callbacks.append(None)
    captured.put_back()
    assert trainer.callbacks.pop() is None


# Other hosts


OTHER_PACKAGE = """
import sys, torch, pytorch_lightning as pl
import pytorch_lightning.demos.boring_classes
from automicro.integrations.lightning import AutoMicrobatch

class Module(pl.demos.boring_classes.BoringModel):
    def training_step(self, batch, batch_idx):
        self.log("loss", loss := self.layer(batch).square().mean())
        return loss

line = AutoMicrobatch(microbatch_size=24)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", callbacks=[line], limit_val_batches=0, **quiet
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(96, 32), 48))
found = f"{line.result.num_samples} rows in {line.result.num_microbatches}"
print(f"{found}, lightning imported: {'lightning.pytorch' in sys.modules}")
"""


def test_pytorch_lightning_package_is_supported(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    script = tmp_path / "script.py"
    script.write_text(OTHER_PACKAGE)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr
    assert "48 rows in 2, lightning imported: False" in done.stdout
