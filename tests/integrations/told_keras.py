"""Values that steps report inside ``fit`` of Keras, for `told`; with ``KERAS_BACKEND=torch``."""

from typing import Any

import keras
import torch
from keras import ops

from automicro.integrations.keras import enable
from automicro.loss.passes import is_extra_pass
from tests.integrations.told import BATCH, KEEPING, Kept, Program, add, data, values_of


class OwnMean(keras.metrics.Metric):
    """A custom metric: the mean of its updates, each with the same weight."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros")
        self.times = self.add_variable((), "zeros")

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.mean(value))
        self.times.assign_add(1.0)

    def result(self) -> Any:
        return self.total / self.times


def update(model: Any, name: str, value: Any) -> None:
    model.told[name].update_state(value)


NOW: dict[str, Any] = {}  # of the current step
METRICS = {
    "mean": keras.metrics.Mean, "sum": keras.metrics.Sum, "own": OwnMean,
    "weighted": keras.metrics.Mean, "rows to a mean": keras.metrics.Mean, "rows to an own": OwnMean,
}  # fmt: skip
WAYS: dict[str, Any] = {
    "mean metric": update,
    "sum metric": update,
    "own metric": update,
    "weighted metric": lambda m, n, v: m.told[n].update_state(v, sample_weight=NOW["rows"]),
    "rows to a mean metric": update,
    "rows to an own metric": update,
    "computed": lambda m, n, v: NOW["computed"].update({n: v}),
    "added to a layer": lambda m, n, v: add(m.keeper, n, float(v)),
    **KEEPING,
}


class Keeper(keras.layers.Layer):
    """A custom layer that may keep numbers."""

    def call(self, x: Any) -> Any:
        return x


class Reporting(keras.Model):
    """Run a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(8, activation="tanh")
        self.keeper, self.outer = Keeper(), keras.layers.Dense(3)
        self.program, self.most = program, 0
        self.told = {
            f"n{nth}": METRICS[each.way.removesuffix(" metric")](name=f"n{nth}")
            for nth, each in enumerate(program.tellings)
            if each.way.endswith(" metric")
        }

    def call(self, x: Any, training: bool = False) -> Any:
        if 0 < self.most < len(x) and not is_extra_pass() and not x.is_meta:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.outer(self.keeper(self.inner(x)))

    @property
    def metrics(self) -> Any:
        return [*super().metrics, *self.told.values()]

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        if y_pred.is_meta:
            return y_pred.mean()
        values = values_of(x, torch.as_tensor(y).long(), y_pred)
        self.tell(values, "fit" if training else "evaluate", lambda way: way != "computed")
        return values["loss"]

    def tell(self, values: Any, where: str, takes: Any) -> None:
        NOW["rows"] = len(values["x"])
        for nth, each in enumerate(self.program.tellings):
            if takes(each.way) and where in (each.where, ""):
                WAYS[each.way](self, f"n{nth}", each.of(values))

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        NOW["computed"] = {}
        self.tell(
            values_of(x, torch.as_tensor(y).long(), y_pred), "", lambda way: way == "computed"
        )
        return {**self.get_metrics_result(), **NOW["computed"]}


class Host:
    """``Model.fit`` of Keras, which computes in fp32 on torch."""

    WAYS, WHERE, CLOSE = WAYS, ("fit", "evaluate"), 2e-5
    OF_ROWS = (
        "rows to a mean metric", "rows to an own metric", "rows appended", "rows extended",
    )  # fmt: skip

    def names(self, program: Program, nth: int) -> list[str]:
        return [f"n{nth}"]

    def run(self, program: Program, *, ours: bool) -> dict[str, Any]:
        keras.utils.set_random_seed(3)
        model = Reporting(program)
        model.compile("sgd")
        x, y = (each.numpy() for each in data())
        model(torch.zeros(1, 6))
        kept = Kept(model, program)
        if ours:
            sizes = {"microbatch_size": 3, "eval_microbatch_size": 3}
            enable(model, **(sizes if program.cut == "size" else {}))
            model.most = 4 if program.cut == "oom" else 0
        rows: list[dict[str, Any]] = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: rows.append(dict(logs))
        )
        history = model.fit(
            x.astype("float32"), y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False,
            callbacks=[note], validation_data=(x.astype("float32"), y),
        ).history  # fmt: skip
        found = kept.found()
        for nth in range(len(program.tellings)):
            name = f"n{nth}"
            found[name].append(getattr(model.keeper, name, []))
            found[name] += [row[name] for row in rows if name in row]
            found[name] += [v for key, each in history.items() if name in key for v in each]
        return found


HOST = Host()
