"""Keras on torch, with and without one additional line. Run by ``test_keras.py``.

Keras reads its backend from the environment when it is imported, so these tests need a separate
process with ``KERAS_BACKEND=torch``.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

pytest.importorskip("keras")

import keras
from keras import layers, ops
from keras.src.backend.common import dtypes

from automicro import (
    BatchNormWarning,
    Halving,
    LossAverageError,
    LossError,
    MemoryBudget,
    Observing,
)
from automicro.batch.device import on_host
from automicro.integrations.keras import enable
from tests.integrations.hosts import HostTests, Ran, max_diff, with_and_without
from tests.integrations.told_keras import HOST
from tests.ranks.world import world_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning"),
]
ROWS, FEATURES, CLASSES = 300, 12, 4
BATCH = 64  # the last batch has 44 rows

_drawn = np.random.default_rng(0)
INPUTS = _drawn.standard_normal((ROWS, FEATURES)).astype("float32")
LABELS = _drawn.integers(0, CLASSES, ROWS)
WEIGHTS = _drawn.random(ROWS).astype("float32")
TOKENS = np.where(_drawn.random((ROWS, 6)) < 0.4, 0, _drawn.integers(1, 20, (ROWS, 6)))
SPARSE = keras.losses.SparseCategoricalCrossentropy


# Models


def classifier(*between: Any, width: int = 128, **options: Any) -> Any:
    given = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], **options}
    optimizer = given.pop("optimizer", None) or keras.optimizers.SGD(0.05, momentum=0.9)
    inner = layers.Dense(width, activation="relu")
    outer = layers.Dense(CLASSES, activation="softmax")
    model = keras.Sequential([keras.Input((FEATURES,)), inner, *between, outer])
    model.compile(optimizer=optimizer, **given)
    return model


def two_outputs(**options: Any) -> Any:
    inputs = {"a": keras.Input((FEATURES,), name="a"), "b": keras.Input((1,), name="b")}
    hidden = layers.Dense(96, activation="tanh")(layers.Concatenate()(list(inputs.values())))
    outputs = {
        "kind": layers.Dense(CLASSES, activation="softmax", name="kind")(hidden),
        "size": layers.Dense(1, name="size")(hidden),
    }
    model = keras.Model(inputs, outputs)
    given: dict[str, Any] = {
        "loss": {"kind": "sparse_categorical_crossentropy", "size": "mse"},
        "loss_weights": {"kind": 1.0, "size": 0.3},
        "metrics": {"kind": ["accuracy"], "size": ["mae"]},
    }
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), **given | options)
    return model


class OwnLoss(keras.Model):
    """Override the loss and the metrics, and skip the calls that Keras would have made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = layers.Dense(128, activation="relu"), layers.Dense(CLASSES)
        self.margin = keras.metrics.Mean(name="margin")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.outer(self.inner(x))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.margin.update_state(ops.max(y_pred, axis=-1))
        return {"margin": self.margin.result(), "loss": super().get_metrics_result()["loss"]}


def compiled(model: Any, loss: Any = None, **options: Any) -> Any:
    model.compile("sgd", loss, **options)
    return model


class ListMetric(keras.metrics.Metric):
    """Append row counts to a list, as user-defined metrics do."""

    def __init__(self) -> None:
        super().__init__(name="listed")
        self.told: list[int] = []

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.told.append(len(y_true))

    def result(self) -> Any:
        return ops.convert_to_tensor(float(sum(self.told)))

    def reset_state(self) -> None:
        del self.told[:]


class Generated(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return INPUTS[rows], LABELS[rows], WEIGHTS[rows]


def masked_model() -> Any:
    inner = layers.Embedding(20, 8, mask_zero=True), layers.Dense(64), layers.Dense(20)
    model = keras.Sequential([keras.Input((6,)), *inner])
    return compiled(model, SPARSE(from_logits=True), weighted_metrics=["accuracy"])


def count_tokens(data: Any) -> Any:
    return (data[0] != 0).sum()


# Runs


def train(
    options: Any,
    *,
    make: Callable[[], Any] = classifier,
    x: Any = INPUTS,
    y: Any = LABELS,
    declared: Any = None,
    policy: str = "float32",
    epochs: int = 2,
    **told: Any,
) -> Ran:
    """Fit, evaluate and predict in a policy of Keras."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(7)
        model = make()
        if options is not None:
            assert enable(model, **(declared or {}), **options) is model
        is_plain = isinstance(x, np.ndarray | dict)
        given: dict[str, Any] = {"x": x, "y": y} if is_plain else {"x": x}
        sizes = [{"batch_size": each} if is_plain else {} for each in (BATCH, 100)]
        validated = (x[:90], y[:90]) if isinstance(x, np.ndarray) else None
        how = {"epochs": epochs, "verbose": 0, "validation_data": validated, **told}
        history = model.fit(**given, **sizes[0], **how).history
        values = model.evaluate(**given, **sizes[1], verbose=0, return_dict=True)
        rows = x if is_plain else INPUTS
        predicted = keras.tree.flatten(model.predict(rows, batch_size=128, verbose=0))
    finally:
        keras.config.set_dtype_policy(before)
    variables = [each.numpy() for each in [*model.variables, *model.optimizer.variables]]
    with on_host():
        tensors = [torch.tensor(np.asarray(e, dtype="float64")) for e in [*variables, *predicted]]
    each_epoch = zip(*history.values(), strict=True)
    logged = [*(dict(zip(history, each, strict=True)) for each in each_epoch), values]
    scales = [float(v.numpy()) for v in model.optimizer.variables if v.name == "dynamic_scale"]
    found = 0 if options is None else model.automicro.last.num_microbatches
    return Ran(tensors, logged, (), model, found, *scales)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Use float64 for layers, metrics, and values that Keras computes in float32 on torch."""
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    try:
        yield
    finally:
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float32"
        keras.config.set_floatx(floatx)


def saved(model: Any, folder: Path, *more: Any) -> None:
    """Fit with a backup."""
    backup = keras.callbacks.BackupAndRestore(str(folder))
    model.fit(
        INPUTS, LABELS, batch_size=BATCH, epochs=4, shuffle=False, verbose=0,
        callbacks=[backup, *more],
    )  # fmt: skip


class Killer(keras.callbacks.Callback):
    """End a run in the middle of its third epoch."""

    epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == (2, 1):
            raise InterruptedError


# Setups that are refused


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def one_layer(kind: Any = keras.Sequential) -> Any:
    return kind([keras.Input((2,)), layers.Dense(1)])


def with_step_on_instance() -> Any:
    model = classifier()
    model.train_step = lambda data: {}
    return model


def recompiled() -> Any:
    model = enable(classifier())
    compiled(model, "sparse_categorical_crossentropy", jit_compile=True)
    return model.train_on_batch(INPUTS, LABELS)


def fitting(options: Any = None, **case: Any) -> Callable[[], Any]:
    return lambda: train(options or {}, **case)


def summed(y_true: Any, y_pred: Any) -> Any:
    return ops.sum(ops.square(ops.cast(y_true, "float32")[:, None] - y_pred))


L2 = {"kernel_regularizer": "l2"}
SPLIT = "splitting changes this batch"
BY_TOKENS: dict[str, Any] = {"make": masked_model, "x": TOKENS, "y": TOKENS}
WEIGHTED = SPARSE(reduction="mean_with_sample_weight")


class TestKeras(HostTests):
    CASES: ClassVar = {
        "listed": {"make": lambda: classifier(metrics=["accuracy", ListMetric()])},
        "dropout": {
            "make": lambda: classifier(layers.Dropout(0.2), layers.Dropout(0.2, seed=3))
        },
        "sample weights": {
            "make": lambda: classifier(weighted_metrics=["accuracy"]), "sample_weight": WEIGHTS
        },
        "mean by weights": {"make": lambda: classifier(loss=WEIGHTED), "sample_weight": WEIGHTS},
        "mean without weights": {"make": lambda: classifier(loss=WEIGHTED)},
        "sum": {
            "make": lambda: classifier(
                loss=SPARSE(reduction="sum"), optimizer=keras.optimizers.SGD(1e-3)
            )
        },
        "regularizers": {
            "make": lambda: classifier(layers.Dense(8, activity_regularizer="l2", **L2))
        },
        "accumulation": {
            "make": lambda: classifier(
                layers.Dense(8, trainable=False),
                optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
            )
        },
        "two outputs": {
            "make": two_outputs, "x": {"a": INPUTS, "b": INPUTS[:, :1]},
            "y": {"kind": LABELS, "size": INPUTS[:, 1:2]},
        },
        "own loss and metrics": {"make": lambda: compiled(OwnLoss())},
        "batches of a data set": {"x": Generated()},
        "mean by tokens": {**BY_TOKENS, "declared": {"loss_average": count_tokens}},
    }  # fmt: skip
    WHOLE = ("dropout",)
    SIZES: ClassVar = {"microbatch_size": 24, "eval_microbatch_size": 40}
    DROPOUT: ClassVar = {}
    EXACT: ClassVar = {}
    CLOSE = 2e-6
    TOLERANCES: ClassVar = {"any limit": 1e-6}
    # In a narrower model, optimizer and metrics could exceed half of the peak.
    MIXED = tuple(
        ({"make": lambda: classifier(width=512), "policy": f"mixed_{kind}"}, 1e-3)
        for kind in ("bfloat16", "float16")
    )
    TOLD = HOST
    MISSING = ((keras.Model, "_compute_loss", lambda x: x, r"keras 3\..* lacks the parameter 'y'"),)
    REFUSED = (
        (lambda: enable(torch.nn.Linear(1, 1)), TypeError, "takes a keras.Model"),
        (lambda: enable(classifier(), forward=print), TypeError, "is set by Keras"),
        (lambda: enable(classifier(), micro=3), TypeError, "micro.* is not known"),
        (lambda: enable(classifier(), batchnorm="ignore"), TypeError, "by microbatch_size=None"),
        (lambda: enable(enable(classifier())), ValueError, "enabled for this model already"),
        (lambda: enable(one_layer()), ValueError, "Call model.compile"),
        (lambda: enable(compiled(one_layer(OwnStep), "mse")), ValueError, "has its own train_step"),
        (lambda: enable(with_step_on_instance()), ValueError, "has its own train_step"),
        (
            lambda: enable(compiled(one_layer(), "mse", jit_compile=True)),
            ValueError,
            "jit_compile=False",
        ),
        (recompiled, ValueError, "compiled again with jit_compile=True"),
        (
            lambda: enable(two_outputs(loss={"kind": SPARSE(reduction="sum"), "size": "mse"})),
            ValueError,
            "2 losses with the reductions",
        ),
        (lambda: enable(classifier(), loss_average="tokens"), ValueError, "'tokens' is not known"),
        (
            lambda: enable(compiled(one_layer(), keras.losses.MeanSquaredError(reduction=None))),
            ValueError,
            "reduction=None",
        ),
        (
            fitting(
                make=lambda: classifier(layers.Dense(8, **L2), loss=SPARSE(reduction="sum"))
            ),
            LossError,
            "count once for each microbatch",
        ),
        (fitting(make=lambda: classifier(loss=summed, metrics=None)), LossAverageError, SPLIT),
        (fitting(**BY_TOKENS), LossError, r"mask_zero=True.*\(data\[0\] != 0\).sum"),
        (
            fitting({"loss_average": "samples", "microbatch_size": 10}, **BY_TOKENS),
            LossAverageError,
            SPLIT,
        ),
    )  # fmt: skip

    def run(self, folder: Path, options: Any, **case: Any) -> Ran:
        return train(options, **case)

    def resumed(self, folder: Path, first: bool, second: bool) -> Ran:
        """Use dropout, because the backup of Keras omits its seeds."""

        def fit(ours: bool, *more: Any) -> Any:
            keras.utils.set_random_seed(7)
            between = layers.Dropout(0.3), layers.Dropout(0.1, seed=3)
            model = classifier(*between, optimizer=keras.optimizers.Adam(1e-2))
            saved(enable(model) if ours else model, folder, *more)
            return [torch.tensor(each.numpy()) for each in model.variables]

        with pytest.raises(InterruptedError):
            fit(first, Killer())
        return Ran(fit(second), [])

    test_run_at_any_limit_matches_or_raises_sample_too_large = pytest.mark.sweep(
        HostTests.test_run_at_any_limit_matches_or_raises_sample_too_large
    )


def test_microbatched_run_matches_keras_in_float64() -> None:
    with in_float64():
        options = {"microbatch_size": 10}
        run = lambda options: train(options, policy="float64")  # noqa: E731
        with_and_without(run, options, close=1e-12, logged=1e-12)


# Batch normalization


def test_batch_normalization_warns_once_and_changes_training() -> None:
    make = lambda: classifier(layers.BatchNormalization(), layers.BatchNormalization())  # noqa: E731
    plain = train(None, make=make)
    with pytest.warns(BatchNormWarning, match=r"2 BatchNormalization layer.*trainable") as told:
        ours = train({"microbatch_size": 32}, make=make)
    assert sum(issubclass(each.category, BatchNormWarning) for each in told) == 1
    assert max_diff(ours.tensors, plain.tensors) > 1e-4
    assert train({"microbatch_size": None}, make=make).logged == plain.logged


class Normed(torch.nn.Module):
    """A torch module with buffers inside a Keras model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(128)

    def forward(self, x: Any) -> Any:
        return self.norm(x)


@pytest.mark.filterwarnings("default::automicro.BatchNormWarning")
def test_torch_module_inside_keras_is_rolled_back_with_warning() -> None:
    failures: list[int] = []

    def fail(event: str, subject: Any) -> None:
        if event == "microbatch_end" and len(subject.batch["0"]) > 16:
            failures.append(len(subject.batch["0"]))
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def job(**options: Any) -> Any:
        keras.utils.set_random_seed(7)
        inside = Normed()
        model = enable(classifier(layers.TorchModuleWrapper(inside)), **options)
        for _ in range(2):
            model.train_on_batch(INPUTS[:BATCH], LABELS[:BATCH])
        return [*map(torch.clone, inside.buffers()), *(v.value.detach() for v in model.variables)]

    undisturbed = job(microbatch_size=16)
    with pytest.warns(BatchNormWarning, match="norm"):
        disturbed = job(microbatch_size=Halving(), features=[Observing(fail)])
    assert failures == [64, 32]
    assert all(map(torch.equal, disturbed, undisturbed))


def compare_rows(y_true: Any, y_pred: Any) -> Any:
    return ops.sum(ops.square(y_pred - ops.mean(y_pred, axis=0)), axis=-1)


@pytest.mark.parametrize("loss", ["circle", compare_rows])
def test_row_comparing_loss_is_unchecked_if_only_one_row_fits(loss: Any) -> None:
    def run_out(module: Any, inputs: Any) -> None:
        if len(inputs[0]) > 1 and inputs[0].device.type != "meta":
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model = classifier(loss=loss, metrics=None)
    model.layers[0].register_forward_pre_hook(run_out)
    enable(model)
    with pytest.warns(UserWarning, match="the assumption that the loss is a mean over samples"):
        model.fit(INPUTS, LABELS, batch_size=8, epochs=4, verbose=0)
    assert model.automicro.last.loss_average_is == "unchecked"


# Lives of a model


def test_disable_restores_keras_and_enable_works_again() -> None:
    model, given = enable(classifier()), {"batch_size": BATCH, "verbose": 0}
    model.fit(INPUTS, LABELS, **given)
    own, last = model.automicro, model.automicro.last
    own.disable()
    assert not {"train_step", "test_step", "predict_step", "automicro"} & set(vars(model))
    model.fit(INPUTS, LABELS, **given)
    assert own.last is last
    enable(model).fit(INPUTS, LABELS, **given)
    assert model.automicro.last is not None


def test_second_fit_matches_keras_after_interrupt_and_recompile() -> None:
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                raise KeyboardInterrupt

    def job(ours: bool) -> Any:
        keras.utils.set_random_seed(5)
        model, given = classifier(), {"batch_size": BATCH, "verbose": 0}
        if ours:
            enable(model)
        with pytest.raises(KeyboardInterrupt):
            model.fit(INPUTS, LABELS, **given, callbacks=[Stops()])
        first = model.fit(INPUTS, LABELS, **given).history
        model.layers[0].trainable = False
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        second = model.fit(INPUTS, LABELS, **given).history
        alone = model.train_on_batch(INPUTS[:9], LABELS[:9]), model.predict_on_batch(INPUTS[:9])
        return first, second, alone[0], alone[1].tolist()

    assert job(True) == job(False)


def test_saved_model_loads_as_plain_keras_model(tmp_path: Path) -> None:
    model, given = enable(classifier()), {"batch_size": BATCH, "verbose": 0, "shuffle": False}
    model.fit(INPUTS, LABELS, **given)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert getattr(loaded, "automicro", None) is None
    plain = loaded.fit(INPUTS, LABELS, **given).history
    assert model.fit(INPUTS, LABELS, **given).history == plain


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_evaluation_below_peak_memory_matches_keras(method: str) -> None:
    def run(ours: bool, limit: int) -> Any:
        keras.utils.set_random_seed(7)
        model = classifier(width=512, metrics=["accuracy", ListMetric()])
        if ours:
            enable(model)
        given = (INPUTS, LABELS)[: 2 if method == "evaluate" else 1]
        with MemoryBudget(limit) as budget:
            found = getattr(model, method)(*given, batch_size=100, verbose=0)
        return np.asarray(found), budget.peak_bytes

    plain, peak = run(False, 2**30)
    with pytest.raises(torch.OutOfMemoryError):
        run(False, peak * 6 // 10)
    found, _ = run(True, peak * 6 // 10)
    assert np.allclose(found, plain, rtol=1e-6, atol=1e-6)


# Several ranks


class Averaging(keras.optimizers.SGD):
    """Average gradients over ranks, as custom loops do."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        for each in grads:
            dist.all_reduce(each)
            each /= dist.get_world_size()
        super().apply(grads, trainable_variables)


def compare_on_ranks() -> tuple[int, float]:
    rank = dist.get_rank()
    told: list[str] = []

    def observe(event: str, subject: Any) -> None:
        told.append(event)
        if rank == 1 and event == "microbatch_end" and len(subject.batch["0"]) > 9:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    make = lambda: classifier(optimizer=Averaging(0.05, momentum=0.9))  # noqa: E731
    rows = slice(rank, None, 2)
    plain, ours = (
        train(options, make=make, x=INPUTS[rows], y=LABELS[rows])
        for options in (None, {"features": [Observing(observe)]})
    )
    count = len(plain.host.variables)
    return told.count("oom"), max_diff(ours.tensors[:count], plain.tensors[:count])


@pytest.mark.slow
def test_averaging_ranks_match_keras_when_one_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with world_of(2) as world:
        (alone, gap), (short, its_gap) = world.run(compare_on_ranks)
    assert alone == 0 < short
    assert max(gap, its_gap) < 1e-6


def enable_distributed() -> list[str]:
    said = []
    for wrap in (torch.nn.parallel.DistributedDataParallel, fully_shard):
        model = classifier(layers.TorchModuleWrapper(wrap(torch.nn.Linear(128, 8))))
        with pytest.raises(ValueError, match="belongs to several ranks") as caught:
            enable(model)
        said.append(str(caught.value))
    return said


@pytest.mark.slow
def test_distributed_modules_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with world_of(2) as world:
        for of_ddp, of_fsdp in world.run(enable_distributed):
            assert "the DistributedDataParallel in the layer" in of_ddp
            assert "the FSDPLinear in the layer" in of_fsdp


def test_sharded_variables_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("automicro.integrations.keras.is_sharded", lambda value: True)
    with pytest.raises(ValueError, match=r"the variable .* belongs to several ranks"):
        enable(classifier())


def test_documented_example_prints_documented_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    page = Path(__file__).resolve().parents[2] / "docs" / "integrations" / "keras.md"
    [code] = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})
    shown = re.findall(r"^print\(.*\)  # (.+)$", code, re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()[-len(shown) :]
    wanted = [".*".join(map(re.escape, line.split("…"))) for line in shown]
    assert wanted
    assert all(map(re.fullmatch, wanted, printed))
