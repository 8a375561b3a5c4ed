"""Values that steps report inside the ``Trainer`` of transformers, for `told`."""

import tempfile
from typing import Any

from torchmetrics import MeanMetric
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from automicro.integrations.transformers import enable
from tests.integrations.told import BATCH, KEEPING, SETTING, Kept, Net, Program, data, values_of

WAYS: dict[str, Any] = {
    "log": lambda t, n, v: t.log({n: float(v)}),
    "log of several": lambda t, n, v: t.log({n: float(v), f"{n}/x": 2.0 * float(v)}),
    "log at times": lambda t, n, v: t.is_odd and t.log({n: float(v)}),
    "state": lambda t, n, v: setattr(t.state, n, v),
    "added to the state": lambda t, n, v: setattr(t.state, n, getattr(t.state, n, 0.0) + v),
    "added to the control": lambda t, n, v: setattr(t.control, n, getattr(t.control, n, 0.0) + v),
    "mean metric": lambda t, n, v: getattr(t, n).update(v),
    "mean metric called": lambda t, n, v: t.log({n: float(getattr(t, n)(v))}),
    "rows to a mean metric": lambda t, n, v: getattr(t, n).update(v),
    "returned": lambda t, n, v: t.returned.update({n: v}),
    "rows returned": lambda t, n, v: t.returned.update({n: v}),
    **KEEPING,
    **SETTING,
}


class NamedInputs(Net):
    """A model with named inputs."""

    def forward(self, x: Any, labels: Any = None) -> Any:
        return {"logits": super().forward(x)}


class Reporting(Trainer):
    """Run a program."""

    program: Program
    returned: dict[str, Any]
    is_odd: bool

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        out = model(**inputs)["logits"]
        values, where = values_of(inputs["x"], inputs["labels"], out), "evaluate"
        where = "train" if model.training else "evaluate"
        self.returned, self.is_odd = {}, float(inputs["x"][0, 0]) > 0
        for nth, each in enumerate(self.program.tellings):
            if each.where == where:
                WAYS[each.way](self, f"n{nth}", each.of(values))
        outputs = {"loss": values["loss"], "logits": out, **self.returned}
        return (values["loss"], outputs) if return_outputs else values["loss"]


class Host:
    """The ``Trainer`` of transformers."""

    WAYS, WHERE, CLOSE = WAYS, ("train", "evaluate"), 1e-6
    OF_ROWS = ("rows appended", "rows extended", "rows returned", "rows to a mean metric")

    def names(self, program: Program, nth: int) -> list[str]:
        # Evaluation outputs lose their names: all of them follow the logits.
        is_returned = "returned" in program.tellings[nth].way
        return [f"n{nth}", "['logits'][" if is_returned else f"n{nth}"]

    def run(self, program: Program, *, ours: bool) -> dict[str, Any]:
        logging.set_verbosity_error()
        rows = [{"x": x, "labels": y} for x, y in zip(*data(), strict=True)]
        arguments = TrainingArguments(
            output_dir=tempfile.gettempdir(), per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH, num_train_epochs=2, learning_rate=0.1,
            logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
            seed=3, remove_unused_columns=False, eval_strategy="epoch", optim="sgd",
        )  # fmt: skip
        trainer: Any = Reporting(
            NamedInputs(), arguments, train_dataset=rows, eval_dataset=rows,
            compute_metrics=lambda found: {
                f"n_{k}": float(abs(each).sum())
                for k, each in enumerate(
                    found.predictions if isinstance(found.predictions, tuple) else ()
                )
            },
        )  # fmt: skip
        trainer.program = program
        kept = Kept(trainer, program)
        of_means = [n for n, each in enumerate(program.tellings) if "mean metric" in each.way]
        metrics = {f"n{nth}": MeanMetric() for nth in of_means}
        vars(trainer).update(metrics)
        if ours:
            sizes = {"microbatch_size": 3, "eval_microbatch_size": 3}
            enable(trainer, **(sizes if program.cut == "size" else {}))
            trainer.model.most = 4 if program.cut == "oom" else None
        trainer.train()
        found = kept.found()
        evaluated = [
            v for row in trainer.state.log_history for k, v in row.items() if "eval_n_" in k
        ]
        for nth, each in enumerate(program.tellings):
            name = f"n{nth}"
            owner = trainer.control if "control" in each.way else trainer.state
            logged = [v for row in trainer.state.log_history for k, v in row.items() if name in k]
            returned = evaluated if "returned" in each.way else []
            metric = metrics[name].metric_state if name in metrics else {}
            found[name] += [logged, returned, getattr(owner, name, []), metric]
        return found


HOST = Host()
