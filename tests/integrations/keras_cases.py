"""Keras on torch, with and without one additional line. Run by ``test_keras.py``.

Keras reads its backend from the environment when it is imported, so these tests need a separate
process with ``KERAS_BACKEND=torch``.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from tests.integrations.both import (
    at_any_limit,
    check,
    check_rows,
    in_less_memory,
    max_diff,
    with_and_without,
)
from tests.integrations.told import Program, host_of, judge
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


def classifier(*between: Any, width: int = 128, **options: Any) -> Any:
    given = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], **options}
    optimizer = given.pop("optimizer", None) or keras.optimizers.SGD(0.05, momentum=0.9)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(width, activation="relu"),
            *between,
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
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
        self.inner = layers.Dense(128, activation="relu")
        self.outer = layers.Dense(CLASSES)
        self.margin = keras.metrics.Mean(name="margin")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.outer(self.inner(x))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        del x, sample_weight, training
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.margin.update_state(ops.max(y_pred, axis=-1))
        return {"margin": self.margin.result(), "loss": super().get_metrics_result()["loss"]}


def own_loss() -> Any:
    model = OwnLoss()
    model.compile(optimizer=keras.optimizers.AdamW(1e-2))
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


class Normed(torch.nn.Module):
    """A torch module with buffers inside a Keras model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(128)

    def forward(self, x: Any) -> Any:
        return self.norm(x)


@dataclass(frozen=True)
class Case:
    """A model, the arguments of ``fit``, and whether splitting is exact."""

    make: Callable[[], Any]
    told: dict[str, Any] = field(default_factory=dict)
    x: Any = None
    y: Any = None
    is_exact: bool = True


def generated() -> Any:
    class Rows(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            rows = slice(index * BATCH, (index + 1) * BATCH)
            return INPUTS[rows], LABELS[rows], WEIGHTS[rows]

    return Rows()


TWO_X = {"a": INPUTS, "b": INPUTS[:, :1]}
TWO_Y = {"kind": LABELS, "size": INPUTS[:, 1:2]}
SPARSE = keras.losses.SparseCategoricalCrossentropy
L2 = {"kernel_regularizer": "l2"}
CASES = {
    "plain": Case(classifier),
    "dropout": Case(lambda: classifier(layers.Dropout(0.2)), is_exact=False),
    "seeded dropout": Case(lambda: classifier(layers.Dropout(0.2, seed=3)), is_exact=False),
    "sample weights": Case(
        lambda: classifier(weighted_metrics=["accuracy"]), {"sample_weight": WEIGHTS}
    ),
    "mean by weights": Case(
        lambda: classifier(loss=SPARSE(reduction="mean_with_sample_weight")),
        {"sample_weight": WEIGHTS},
    ),
    "mean without weights": Case(
        lambda: classifier(loss=SPARSE(reduction="mean_with_sample_weight"))
    ),
    "sum": Case(
        lambda: classifier(loss=SPARSE(reduction="sum"), optimizer=keras.optimizers.SGD(1e-3))
    ),
    "regularizers": Case(lambda: classifier(layers.Dense(8, activity_regularizer="l2", **L2))),
    "accumulation": Case(
        lambda: classifier(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
    ),
    "two outputs": Case(two_outputs, x=TWO_X, y=TWO_Y),
    "own loss and metrics": Case(own_loss),
    "area under the curve": Case(
        lambda: classifier(metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2), ListMetric()])
    ),
    "batches of a data set": Case(classifier, x=generated()),
    "frozen": Case(lambda: classifier(layers.Dense(8, trainable=False))),
}
each_case = pytest.mark.parametrize("name", CASES)


@dataclass
class Trained:
    """The results of a run: variables, predictions, and the logs of each epoch."""

    history: dict[str, list[float]]
    evaluated: dict[str, float]
    parameters: list[torch.Tensor]
    model: Any
    events: tuple[str, ...] = ()

    @property
    def logged(self) -> list[dict[str, float]]:
        epochs = zip(*self.history.values(), strict=True)
        return [*(dict(zip(self.history, each, strict=True)) for each in epochs), self.evaluated]


def train(case: Case, *, ours: bool, **options: Any) -> Trained:
    keras.utils.set_random_seed(7)
    model = case.make()
    if ours:
        assert enable(model, **options) is model
    x = INPUTS if case.x is None else case.x
    y = LABELS if case.y is None else case.y
    given: dict[str, Any] = {"x": x, "y": y, "batch_size": BATCH}
    evaluated: dict[str, Any] = {"x": x, "y": y, "batch_size": 100}
    if not isinstance(x, np.ndarray | dict):  # has its own labels and batches
        given = evaluated = {"x": x}
    validated = (INPUTS[:90], LABELS[:90]) if case.y is None else None
    history = model.fit(**given, epochs=3, verbose=0, validation_data=validated, **case.told)
    values = model.evaluate(**evaluated, verbose=0, return_dict=True)
    rows = x if isinstance(x, np.ndarray | dict) else INPUTS
    predicted = keras.tree.flatten(model.predict(rows, batch_size=128, verbose=0))
    variables = [each.numpy() for each in [*model.variables, *model.optimizer.variables]]
    arrays = [*variables, *predicted]
    with on_host():
        parameters = [torch.tensor(np.asarray(each, dtype="float64")) for each in arrays]
    return Trained(history.history, values, parameters, model)


def running(case: Case, **given: Any) -> Callable[[Any], Trained]:
    """Make runs of a case, without automicro or with its options."""

    def run(options: Any) -> Trained:
        return train(case, ours=options is not None, **(given if options is not None else {}))

    return run


def same(ours: list[np.ndarray], plain: list[np.ndarray]) -> bool:
    return len(ours) == len(plain) and all(map(np.array_equal, ours, plain))


@each_case
def test_run_without_limit_matches_keras_bitwise(name: str) -> None:
    _, ours = with_and_without(running(CASES[name]))
    assert ours.model.automicro.last.num_samples in (44, BATCH)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Use float64 for layers, metrics, and values that Keras computes in float32 on torch."""
    before, floatx = keras.config.dtype_policy(), keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    try:
        yield
    finally:
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float32"
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(before)


def in_half(case: Case, **options: Any) -> tuple[Trained, Trained]:
    """Return a plain run, and one with automicro in memory too small for the plain run."""
    plain, ours = in_less_memory(running(case, **options))
    assert ours.model.automicro.microbatch_size < BATCH
    return plain, ours


COUNTED = ("two outputs", "area under the curve", "plain")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_exact])
def test_run_in_half_memory_matches_keras(name: str) -> None:
    plain, ours = in_half(CASES[name])
    check_rows(ours.logged, plain.logged)
    for row, other in zip(ours.logged, plain.logged, strict=True):
        for metric in row if name in COUNTED else ():  # no row is counted twice
            if "accuracy" in metric or "listed" in metric:
                assert row[metric] == other[metric]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_run_in_half_memory_matches_keras_in_mixed_precision(policy: str) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        # In a narrower model, optimizer and metrics could exceed half of the peak.
        plain, ours = in_half(Case(lambda: classifier(width=512)))
    finally:
        keras.config.set_dtype_policy(before)
    losses = (each.history["loss"] for each in (ours, plain))
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-3
    if policy == "mixed_float16":
        scales = [each.model.optimizer.dynamic_scale.numpy() for each in (ours, plain)]
        assert scales[0] == scales[1]


def test_run_in_half_memory_matches_keras_in_float64() -> None:
    with in_float64():
        plain, ours = in_half(Case(classifier))
    check(ours, plain, close=1e-12, logged=1e-12)


@pytest.mark.sweep
def test_run_at_any_limit_matches_or_raises_sample_too_large() -> None:
    case = Case(
        lambda: classifier(metrics=["accuracy", ListMetric()], optimizer=keras.optimizers.SGD(0.1))
    )
    at_any_limit(running(case), close=1e-6, limits=25, first=4)  # less cannot hold the model


def test_batch_normalization_warns_once_and_changes_training() -> None:
    case = Case(lambda: classifier(layers.BatchNormalization(), layers.BatchNormalization()))
    plain = train(case, ours=False)
    half = {"microbatch_size": 32}  # fixed, because statistics depend on it
    with pytest.warns(
        BatchNormWarning, match=r"2 BatchNormalization layer\(s\).*trainable"
    ) as told:
        ours = train(case, ours=True, **half)
    assert sum(issubclass(each.category, BatchNormWarning) for each in told) == 1
    assert max_diff(ours.parameters, plain.parameters) > 1e-4
    whole = train(case, ours=True, microbatch_size=None)
    assert whole.history == plain.history


class Failing:
    """Run out of memory at the end of microbatches of 64 and of 32 rows."""

    failed = 0

    def __call__(self, event: str, subject: Any) -> None:
        if event == "microbatch_end" and len(subject.batch["0"]) > 16:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.filterwarnings("default::automicro.BatchNormWarning")
def test_torch_module_inside_keras_is_rolled_back_with_warning() -> None:
    def job(**options: Any) -> Any:
        keras.utils.set_random_seed(7)
        inside = Normed()
        model = classifier(layers.TorchModuleWrapper(inside))
        enable(model, **options)
        for _ in range(2):
            model.train_on_batch(INPUTS[:BATCH], LABELS[:BATCH])
        return [*map(torch.clone, inside.buffers())], [v.numpy() for v in model.variables]

    undisturbed = job(microbatch_size=16)
    failing = Failing()
    with pytest.warns(BatchNormWarning, match="norm"):
        disturbed = job(microbatch_size=Halving(), features=[Observing(failing)])
    assert failing.failed == 2
    assert all(map(torch.equal, disturbed[0], undisturbed[0]))
    assert same(disturbed[1], undisturbed[1])


def masked_model(**options: Any) -> Any:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Embedding(20, 8, mask_zero=True),
            layers.Dense(64),
            layers.Dense(20),
        ]
    )
    model.compile("sgd", SPARSE(from_logits=True), weighted_metrics=["accuracy"])
    return model


TOKENS = np.where(_drawn.random((ROWS, 6)) < 0.4, 0, _drawn.integers(1, 20, (ROWS, 6)))


def test_masked_loss_requires_loss_average() -> None:
    case = Case(masked_model, x=TOKENS, y=TOKENS)
    with pytest.raises(LossError, match=r"mask_zero=True.*\(data\[0\] != 0\).sum"):
        train(case, ours=True)
    plain = train(case, ours=False)
    count = lambda data: (data[0] != 0).sum()  # noqa: E731
    whole = train(case, ours=True, loss_average=count)
    assert whole.history == plain.history
    ours = train(case, ours=True, loss_average=count, microbatch_size=10)
    check_rows(ours.logged, plain.logged)
    with pytest.raises(LossAverageError, match="splitting changes this batch"):
        train(case, ours=True, loss_average="samples", microbatch_size=10)


def test_loss_that_is_not_mean_raises() -> None:
    def summed(y_true: Any, y_pred: Any) -> Any:
        return ops.sum(ops.square(ops.cast(y_true, "float32")[:, None] - y_pred))

    model = classifier(loss=summed, metrics=None)
    enable(model)
    with pytest.raises(LossAverageError, match="splitting changes this batch"):
        model.fit(INPUTS, LABELS, batch_size=BATCH, verbose=0)


def compare_rows(y_true: Any, y_pred: Any) -> Any:
    return ops.sum(ops.square(y_pred - ops.mean(y_pred, axis=0)), axis=-1)


@pytest.mark.parametrize("loss", ["circle", "Circle", keras.losses.Circle(), compare_rows])
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


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def model_with_own_step() -> Any:
    model = OwnStep([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def model_with_step_on_instance() -> Any:
    model = classifier()
    model.train_step = lambda data: {}
    return model


def enabled_model() -> Any:
    return enable(classifier())


def compiled_model(loss: Any = "mse", **options: Any) -> Any:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", loss, **options)
    return model


def mixed_reductions() -> Any:
    return two_outputs(loss={"kind": SPARSE(reduction="sum"), "size": "mse"})


def fit_enabled(model: Any, **options: Any) -> Any:
    enable(model, **options).fit(INPUTS, LABELS, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (lambda: enable(torch.nn.Linear(1, 1)), TypeError, "takes a keras.Model"),
        (lambda: enable(classifier(), forward=print), TypeError, "is set by Keras"),
        (lambda: enable(classifier(), micro=3), TypeError, "micro.* is not known"),
        (lambda: enable(classifier(), batchnorm="ignore"), TypeError, "by microbatch_size=None"),
        (lambda: enable(enabled_model()), ValueError, "enabled for this model already"),
        (lambda: enable(keras.Sequential([layers.Dense(1)])), ValueError, "Call model.compile"),
        (lambda: enable(model_with_own_step()), ValueError, "has its own train_step"),
        (lambda: enable(model_with_step_on_instance()), ValueError, "has its own train_step"),
        (lambda: enable(compiled_model(jit_compile=True)), ValueError, "jit_compile=False"),
        (lambda: enable(mixed_reductions()), ValueError, "2 losses with the reductions"),
        (lambda: enable(classifier(), loss_average="tokens"), ValueError, "'tokens' is not known"),
        (
            lambda: enable(compiled_model(loss=keras.losses.MeanSquaredError(reduction=None))),
            ValueError,
            "reduction=None",
        ),
        (
            lambda: fit_enabled(classifier(layers.Dense(8, **L2), loss=SPARSE(reduction="sum"))),
            LossError,
            "count once for each microbatch",
        ),
    ],
)
def test_unsupported_setups_are_rejected(wrong: Any, kind: Any, says: str) -> None:
    with pytest.raises(kind, match=says):
        wrong()


def test_recompiling_with_jit_compile_is_rejected() -> None:
    model = enabled_model()
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    with pytest.raises(ValueError, match="compiled again with jit_compile=True"):
        model.train_on_batch(INPUTS, LABELS)


def test_missing_host_method_error_names_version(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier()
    monkeypatch.setattr(keras.Model, "_compute_loss", lambda self, x: None)
    with pytest.raises(ImportError, match=r"keras 3\..* lacks the parameter 'y'"):
        enable(model)


def test_disable_restores_keras_and_enable_works_again() -> None:
    model = classifier()
    enable(model).fit(INPUTS, LABELS, batch_size=BATCH, verbose=0)
    own = model.automicro
    model.automicro.disable()
    assert not {"train_step", "test_step", "predict_step", "automicro"} & set(vars(model))
    last = own.last
    model.fit(INPUTS, LABELS, batch_size=BATCH, verbose=0)
    assert own.last is last
    enable(model).fit(INPUTS, LABELS, batch_size=BATCH, verbose=0)
    assert model.automicro.last is not None


def test_second_fit_matches_keras_after_interrupt_and_recompile() -> None:
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                raise KeyboardInterrupt

    def job(ours: bool) -> Any:
        keras.utils.set_random_seed(5)
        model = classifier()
        if ours:
            enable(model)
        with pytest.raises(KeyboardInterrupt):
            model.fit(INPUTS, LABELS, batch_size=BATCH, verbose=0, callbacks=[Stops()])
        first = model.fit(INPUTS, LABELS, batch_size=BATCH, verbose=0).history
        model.layers[0].trainable = False
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        second = model.fit(INPUTS, LABELS, batch_size=BATCH, verbose=0).history
        alone = model.train_on_batch(INPUTS[:9], LABELS[:9]), model.predict_on_batch(INPUTS[:9])
        return first, second, alone[0], alone[1].tolist()

    assert job(True) == job(False)


class Killer(keras.callbacks.Callback):
    """End a run in the middle of its third epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self.params["epoch"], batch) == (2, 1):
            raise InterruptedError

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.params["epoch"] = epoch


@pytest.mark.parametrize(("first", "second"), [(True, True), (False, True), (True, False)])
def test_killed_run_resumes_from_backup_with_or_without_automicro(
    first: bool, second: bool, tmp_path: Path
) -> None:
    """Use dropout, because the backup of Keras omits its seeds."""

    def fit(ours: bool, folder: Path, *more: Any) -> Any:
        keras.utils.set_random_seed(7)
        between = layers.Dropout(0.3), layers.Dropout(0.1, seed=3)
        model = classifier(*between, optimizer=keras.optimizers.Adam(1e-2))
        if ours:
            enable(model)
        model.fit(
            INPUTS, LABELS, batch_size=BATCH, epochs=4, shuffle=False, verbose=0,
            callbacks=[keras.callbacks.BackupAndRestore(str(folder)), *more],
        )  # fmt: skip
        return [each.numpy() for each in [*model.variables, *model.optimizer.variables]]

    def resumed(first: bool, second: bool, folder: Path) -> Any:
        with pytest.raises(InterruptedError):
            fit(first, folder, Killer())
        return fit(second, folder)

    found = resumed(first, second, tmp_path / "ours")
    assert same(found, resumed(False, False, tmp_path / "plain"))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("seed", range(6))
def test_reported_values_match_host_or_warn(seed: int) -> None:
    host = host_of("keras")
    verdict = judge(host, Program.drawn(host, seed))
    assert verdict.kind != "silent", verdict.about


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("cut", ["size", "oom"])
def test_each_way_of_reporting_matches_host_or_warns(cut: str) -> None:
    host = host_of("keras")
    for program in Program.of_every_way(host, cut):
        verdict = judge(host, program)
        assert verdict.kind != "silent", verdict.about


class Averaging(keras.optimizers.SGD):
    """Average gradients over ranks, as custom loops do."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        for each in grads:
            dist.all_reduce(each)
            each /= dist.get_world_size()
        super().apply(grads, trainable_variables)


def train_on_a_rank(ours: bool) -> Any:
    rank = dist.get_rank()
    keras.utils.set_random_seed(7)
    model = classifier(optimizer=Averaging(0.05, momentum=0.9))
    told: list[str] = []

    def observe(event: str, subject: Any) -> None:
        told.append(event)
        if rank == 1 and event == "microbatch_end" and len(subject.batch["0"]) > 9:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    if ours:
        enable(model, features=[Observing(observe)])
    rows = slice(rank, None, 2)
    model.fit(INPUTS[rows], LABELS[rows], batch_size=32, epochs=3, verbose=0)
    return told.count("oom"), [each.numpy() for each in model.variables]


def compare_on_ranks() -> Any:
    (_, plain), (ooms, ours) = train_on_a_rank(False), train_on_a_rank(True)
    return ooms, max(float(np.abs(a - b).max()) for a, b in zip(ours, plain, strict=True))


@pytest.mark.slow
def test_averaging_ranks_match_keras_when_one_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with world_of(2) as world:
        (alone, gap), (short, its_gap) = world.run(compare_on_ranks)
    assert alone == 0 < short
    assert max(gap, its_gap) < 1e-6


def enable_distributed() -> list[str]:
    said = []
    for wrap in (torch.nn.parallel.DistributedDataParallel, fully_shard):
        inside = torch.nn.Linear(128, 8)
        model = classifier(layers.TorchModuleWrapper(wrap(inside)))
        with pytest.raises(ValueError, match="belongs to several ranks") as caught:
            enable(model)
        said.append(str(caught.value))
    return said


@pytest.mark.slow
def test_distributed_modules_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with world_of(2) as world:
        for of_ddp, of_fsdp in world.run(enable_distributed):
            assert "the DistributedDataParallel in the layer" in of_ddp
            assert "the FSDPLinear in the layer" in of_fsdp


def test_sharded_variables_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("automicro.integrations.keras.is_sharded", lambda value: True)
    with pytest.raises(ValueError, match=r"the variable .* belongs to several ranks"):
        enable(classifier())


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_evaluation_below_peak_memory_matches_keras(method: str) -> None:
    def run(ours: bool, limit: int | None = None) -> Any:
        keras.utils.set_random_seed(7)
        model = classifier(width=512, metrics=["accuracy", ListMetric()])
        if ours:
            enable(model)
        given = (INPUTS, LABELS)[: 2 if method == "evaluate" else 1]
        with MemoryBudget("1GiB" if limit is None else limit) as budget:
            found = getattr(model, method)(*given, batch_size=100, verbose=0)
        return found, budget.peak_bytes, model

    plain, peak, _ = run(False)
    with pytest.raises(torch.OutOfMemoryError):
        run(False, peak * 6 // 10)
    found, _, model = run(True, peak * 6 // 10)
    if method == "predict":
        assert np.allclose(found, plain, rtol=1e-6, atol=1e-7)
        assert found.shape == plain.shape
        return
    assert model.automicro.last_evaluation.num_microbatches > 1
    assert found[1:] == plain[1:]
    assert abs(found[0] - plain[0]) < 1e-6


def test_saved_model_loads_as_plain_keras_model(tmp_path: Path) -> None:
    model = enabled_model()
    model.fit(INPUTS, LABELS, batch_size=BATCH, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert getattr(loaded, "automicro", None) is None
    plain = loaded.fit(INPUTS, LABELS, batch_size=BATCH, verbose=0, shuffle=False).history
    assert model.fit(INPUTS, LABELS, batch_size=BATCH, verbose=0, shuffle=False).history == plain


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
