r"""Composer's Trainer compared with ours: the same job in both, and their final differences.

    python -m benchmarks.beside_composer [--only TEXT] [--json FILE]

It needs a separate environment, because Composer requires older versions of torch and torchmetrics:

    python3.11 -m venv ../composer && . ../composer/bin/activate
    pip install torch==2.13.0 torchmetrics==1.9.0 transformers rich psutil mosaicml-cli \
        torch_optimizer coolname tabulate py-cpuinfo importlib-metadata
    pip install --no-deps mosaicml==0.32.1 torchvision

and runs from the root of the repository, against the working tree. Every job is trained twice on
the CPU, with the same model, batches, seed and microbatch size. The table shows the largest
difference of final weights and of other numbers: metrics, learning rates, the batches after which
evaluations ran. Each nonzero difference is explained.
"""

import argparse
import dataclasses
import datetime
import importlib
import json
import logging
import math
import pathlib
import platform
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import automicro
from automicro import Callback, CheckpointConfig, Run, Trainer
from automicro.features import with_features
from benchmarks.sizes_of_peers import repair_torchvision, version_of

ROWS, FEATURES, CLASSES, BATCH, MICROBATCH, SEED = 88, 12, 3, 24, 8, 7
"""Four batches an epoch, of which the last one has two microbatches and not three."""


@dataclasses.dataclass
class Ended:
    """Final state of a run.

    Attributes:
        weights: final parameters and buffers.
        others: numbers to compare by name, in mappings and lists.
        undisturbed: distance of the weights from those of a run that was not resumed.
    """

    weights: list[Tensor]
    others: dict[str, Any] = dataclasses.field(default_factory=dict)
    undisturbed: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One job for both trainers.

    Attributes:
        composers: runs it with Composer's Trainer.
        ours: runs it with ours.
        named: why the results differ bit by bit; empty if they are equal.
    """

    composers: Callable[[], Ended]
    ours: Callable[[], Ended]
    named: str = ""


def data(*, shuffle: bool = True, generator: bool = False, rows: int = ROWS) -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(2)
    inputs = torch.randn(rows, FEATURES, generator=drawn)
    dataset = TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))
    own = torch.Generator().manual_seed(3) if generator else None
    return DataLoader(dataset, batch_size=BATCH, shuffle=shuffle, generator=own)


def unshuffled() -> DataLoader[Any]:
    """Return a loader for evaluation, whose own generator keeps the process's random state."""
    return data(shuffle=False, generator=True)


def network(*layers: nn.Module, dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 32), *layers, nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, CLASSES)
    )


def classifier(*layers: nn.Module, dropout: float = 0.2) -> Any:
    models = importlib.import_module("composer.models")
    torch.manual_seed(1)
    return models.ComposerClassifier(network(*layers, dropout=dropout), num_classes=CLASSES)


def losing(form: Callable[[Tensor, Tensor], Any]) -> Any:
    """Return a model with several losses."""
    models: Any = importlib.import_module("composer.models")

    class Losing(models.ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = network()

        def forward(self, batch: Any) -> Any:
            return self.net(batch[0])

        def loss(self, outputs: Any, batch: Any, *_: Any, **__: Any) -> Any:
            return form(F.cross_entropy(outputs, batch[1]), outputs.square().mean())

    return Losing()


def sentences(rows: int = ROWS) -> DataLoader[Any]:
    """Return batches by name, as Hugging Face's models take them."""
    drawn = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 50, (rows, 10), generator=drawn)
    samples = [
        {"input_ids": one, "attention_mask": torch.ones_like(one), "labels": one.sum() % CLASSES}
        for one in ids
    ]
    return DataLoader(samples, batch_size=BATCH, generator=torch.Generator())  # type: ignore[arg-type]


def text_classifier() -> Any:
    transformers: Any = importlib.import_module("transformers")
    models: Any = importlib.import_module("composer.models")
    accuracy: Any = importlib.import_module("torchmetrics.classification").MulticlassAccuracy
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=CLASSES,
    )
    return models.HuggingFaceModel(
        transformers.BertForSequenceClassification(config),
        metrics=[accuracy(num_classes=CLASSES, average="micro")],
        use_logits=True,
    )


def language_model() -> Any:
    transformers: Any = importlib.import_module("transformers")
    models: Any = importlib.import_module("composer.models")
    metrics: Any = importlib.import_module("composer.metrics")
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=50, n_positions=10, n_embd=16, n_layer=2, n_head=2)
    return models.HuggingFaceModel(
        transformers.GPT2LMHeadModel(config),
        metrics=[metrics.LanguageCrossEntropy()],
        use_logits=True,
    )


def texts() -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 50, (ROWS, 10), generator=drawn)
    rows = [{"input_ids": each, "attention_mask": each > 0, "labels": each} for each in ids]
    return DataLoader(rows, batch_size=BATCH, generator=torch.Generator())  # type: ignore[arg-type]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.state_dict().values()]


def composers_trainer(model: Any, loader: Any, **options: Any) -> Any:
    composer = importlib.import_module("composer")
    settings = {
        "optimizers": sgd(model),
        "max_duration": "2ep",
        "device": "cpu",
        "device_train_microbatch_size": MICROBATCH,
        "seed": SEED,
        "progress_bar": False,
        "log_to_console": False,
    }
    return composer.Trainer(model=model, train_dataloader=loader, **{**settings, **options})


def our_trainer(model: Any, loader: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "optimizer": sgd(model),
        "max_duration": "2ep",
        "device": "cpu",
        "microbatch_size": MICROBATCH,
        "seed": SEED,
        "progress": False,
    }
    return Trainer(model, loader, **with_features({**settings, **options}))


def run_composers(
    model: Callable[[], Any], loader: Callable[[], Any] = data, **options: Any
) -> Ended:
    made = model()
    trainer = composers_trainer(made, loader(), **options)
    trainer.fit()
    trainer.close()
    return Ended(weights_of(made))


def run_ours(model: Callable[[], Any], loader: Callable[[], Any] = data, **options: Any) -> Ended:
    made = model()
    our_trainer(made, loader(), **options).fit()
    return Ended(weights_of(made))


def both(
    model: Callable[[], Any],
    loader: Callable[[], Any] = data,
    *,
    composers: Callable[[], Mapping[str, Any]] = dict,
    ours: Callable[[], Mapping[str, Any]] = dict,
    named: str = "",
    **options: Any,
) -> Case:
    """Return the same options for both, and some with different names, created for each run."""
    return Case(
        composers=lambda: run_composers(model, loader, **options, **composers()),
        ours=lambda: run_ours(model, loader, **options, **ours()),
        named=named,
    )


# Metrics and evaluations.


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def in_training(metrics: Mapping[str, float], is_compared: bool) -> dict[str, Any]:
    assert metrics
    assert all(map(math.isfinite, metrics.values()))
    return {"metrics of training": metrics} if is_compared else {}


def evaluate_composers(
    model: Callable[[], Any],
    loader: Callable[[], Any],
    of: Callable[[], Any],
    trains: bool,
    **options: Any,
) -> Ended:
    composer: Any = importlib.import_module("composer")
    seen: list[Any] = []

    class Watch(composer.Callback):  # type: ignore[misc]
        def eval_end(self, state: Any, logger: Any) -> None:
            values = state.eval_metrics[state.dataloader_label].items()
            found = {name: float(metric.compute()) for name, metric in values}
            seen.append((int(state.timestamp.batch), state.dataloader_label, found))

    made = model()
    trainer = composers_trainer(
        made, loader(), eval_dataloader=of(), callbacks=[Watch()], **options
    )
    trainer.fit()
    metrics = numbers(trainer.state.train_metric_values)
    trainer.close()
    return Ended(weights_of(made), {"evaluations": seen, **in_training(metrics, trains)})


def evaluate_ours(
    model: Callable[[], Any],
    loader: Callable[[], Any],
    of: Callable[[], Any],
    trains: bool,
    **options: Any,
) -> Ended:
    seen: list[Any] = []

    class Watch(Callback):
        def eval_end(self, run: Run, values: Mapping[str, float]) -> None:
            name = next(iter(values)).removeprefix("eval/").rpartition("/")[0]
            found = {key.rpartition("/")[2]: value for key, value in values.items()}
            seen.append((run.state.batch, name or "eval", found))

    made = model()
    trainer = our_trainer(made, loader(), eval_dataloader=of(), callbacks=[Watch()], **options)
    trainer.fit()
    metrics = dict(trainer.state.train.metrics)
    return Ended(weights_of(made), {"evaluations": seen, **in_training(metrics, trains)})


def evaluated(
    model: Callable[[], Any],
    loader: Callable[[], Any],
    of: Callable[[], Any] = unshuffled,
    trains: bool = False,
    named: str = "",
    **options: Any,
) -> Case:
    return Case(
        composers=partial(evaluate_composers, model, loader, of, trains, **options),
        ours=partial(evaluate_ours, model, loader, of, trains, **options),
        named=named,
    )


# Learning rates.


def schedule_composers(make: Callable[[Any], Any], **options: Any) -> Ended:
    composer: Any = importlib.import_module("composer")
    rates: list[float] = []

    class Watch(composer.Callback):  # type: ignore[misc]
        def before_train_batch(self, state: Any, logger: Any) -> None:
            rates.append(state.optimizers[0].param_groups[0]["lr"])

    model = classifier()
    optimizer = sgd(model)
    trainer = composers_trainer(
        model,
        data(),
        optimizers=optimizer,
        schedulers=make(optimizer),
        callbacks=[Watch()],
        **options,
    )
    trainer.fit()
    trainer.close()
    return Ended(weights_of(model), {"learning rates": rates})


def schedule_ours(make: Callable[[Any], Any], **options: Any) -> Ended:
    rates: list[float] = []

    class Watch(Callback):
        def batch_start(self, run: Run, batch: Any) -> None:
            assert run.optimizer is not None
            rates.append(run.optimizer.param_groups[0]["lr"])

    model = classifier()
    optimizer = sgd(model)
    our_trainer(
        model,
        data(),
        optimizer=optimizer,
        scheduler=make(optimizer),
        callbacks=[Watch()],
        **options,
    ).fit()
    return Ended(weights_of(model), {"learning rates": rates})


def scheduled(make: Callable[[Any], Any], duration: str = "3ep", **options: Any) -> Case:
    return Case(
        composers=partial(schedule_composers, make, max_duration=duration),
        ours=partial(schedule_ours, make, max_duration=duration, **options),
    )


# Resumed runs.


def resume_composers(at: int, until: str, loader: Callable[[], Any] = data) -> Ended:
    with tempfile.TemporaryDirectory() as folder:
        options = {"save_folder": folder, "save_interval": f"{at}ba", "max_duration": until}
        first = composers_trainer(classifier(), loader(), **options)
        first.fit()
        first.close()
        whole = weights_of(first.state.model)
        name = next(pathlib.Path(folder).glob(f"ep*-ba{at}-rank0.pt"))
        model = classifier()
        again = composers_trainer(model, loader(), max_duration=until, load_path=str(name))
        again.fit()
        again.close()
    return Ended(weights_of(model), undisturbed=difference(whole, weights_of(model)))


def resume_ours(at: int, until: str, loader: Callable[[], Any] = data) -> Ended:
    with tempfile.TemporaryDirectory() as folder:
        whole = run_ours(classifier, loader, max_duration=until).weights
        config = CheckpointConfig(folder=folder, interval=f"{at}ba", keep_last=None)

        class Kill(Callback):
            def batch_end(self, run: Run, result: Any) -> None:
                if run.state.batch == at + 1:  # after the checkpoint: one batch is lost
                    raise InterruptedError

        try:
            run_ours(classifier, loader, max_duration=until, checkpoint=config, callbacks=[Kill()])
        except InterruptedError:
            ended = run_ours(classifier, loader, max_duration=until, checkpoint=config)
    ended.undisturbed = difference(whole, ended.weights)
    return ended


def resumed(at: int, loader: Callable[[], Any], named: str = "") -> Case:
    return Case(
        composers=partial(resume_composers, at, "3ep", loader),
        ours=partial(resume_ours, at, "3ep", loader),
        named=named,
    )


# Longer runs.


def longer_composers(loader: Callable[[], Any], *durations: str) -> Ended:
    model = classifier()
    trainer = composers_trainer(model, loader(), max_duration="1ep")
    trainer.fit()
    for duration in durations:
        trainer.fit(duration=duration)
    trainer.close()
    return Ended(weights_of(model), {"batches": int(trainer.state.timestamp.batch)})


def longer_ours(loader: Callable[[], Any], *durations: str) -> Ended:
    model = classifier()
    trainer = our_trainer(model, loader(), max_duration="1ep")
    trainer.fit()
    for duration in durations:
        trainer.fit(duration=duration)
    return Ended(weights_of(model), {"batches": trainer.state.batch})


def longer(loader: Callable[[], Any], named: str = "") -> Case:
    return Case(
        composers=partial(longer_composers, loader, "1ep", "3ba"),
        ours=partial(longer_ours, loader, "1ep", "3ba"),
        named=named,
    )


def clipping() -> Mapping[str, Any]:
    algorithms: Any = importlib.import_module("composer.algorithms")
    return {"algorithms": [algorithms.GradientClipping("norm", clipping_threshold=0.1)]}


def total_alone(fit: Tensor, size: Tensor) -> Any:
    return {"total": fit + 0.1 * size, "fit": fit, "size": size}


def by_name(fit: Tensor, size: Tensor) -> Any:
    return {"fit": fit, "size": size}


DRAWS = (
    "a pass over Composer's evaluation draws a random number of the process, so that training "
    "with dropout or shuffling depends on it; ours puts them back. With a generator of the "
    "loader's own, as in the rows above, both are the same"
)
SPINS = (
    "Composer begins each pass that is behind it once more, which draws other random numbers: "
    "the rows come in another order than without the interruption. Here they do not"
)
UNEVEN = "Composer cuts 18 rows into 8 + 8 + 2, ours into 6 + 6 + 6: sums round otherwise"
BY_EPOCH = "Composer counts the metrics of training anew in every batch, ours in every epoch"

CASES: dict[str, Case] = {
    "whole batches": both(
        classifier,
        composers=lambda: {"device_train_microbatch_size": BATCH},
        ours=lambda: {"microbatch_size": None},
    ),
    "microbatches of 8 rows": both(classifier),
    "microbatches that do not divide a batch": both(
        classifier, partial(data, rows=90), named=UNEVEN
    ),
    "without dropout": both(partial(classifier, dropout=0.0)),
    "BatchNorm": both(lambda: classifier(nn.BatchNorm1d(32)), ours=lambda: {"batchnorm": "ignore"}),
    "clipping": both(classifier, composers=clipping, ours=lambda: {"grad_clip_norm": 0.1}),
    "a mapping of losses with total": both(partial(losing, total_alone)),
    "a mapping of losses": both(partial(losing, by_name)),
    "a tuple of losses": both(partial(losing, lambda fit, size: (fit, size))),
    "HuggingFaceModel (BERT) with metrics": evaluated(text_classifier, sentences, sentences),
    "HuggingFaceModel (GPT-2) with metrics": evaluated(language_model, texts, texts),
    "metrics of training, a batch an epoch": evaluated(
        classifier, partial(data, rows=BATCH), trains=True, max_duration="4ep"
    ),
    "metrics of training, HuggingFaceModel": evaluated(
        text_classifier, partial(sentences, BATCH), sentences, trains=True, max_duration="4ep"
    ),
    "metrics of training, several batches": evaluated(
        classifier, data, trains=True, named=BY_EPOCH
    ),
    "evaluation every epoch": evaluated(classifier, data, eval_interval="1ep"),
    "evaluation every 3 batches": evaluated(classifier, data, eval_interval="3ba"),
    "evaluation every 2 epochs of 3": evaluated(
        classifier, data, eval_interval="2ep", max_duration="3ep"
    ),
    "evaluation without a generator": evaluated(
        classifier, data, partial(data, shuffle=False), named=DRAWS
    ),
    "resumed in the middle of an epoch": resumed(6, unshuffled),
    "resumed in the middle of an epoch, shuffled": resumed(6, data, named=SPINS),
    "resumed at the end of an epoch, shuffled": resumed(4, data),
    "StepLR after every epoch": scheduled(
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        scheduler_interval="epoch",
    ),
    "200 samples": both(classifier, max_duration="200sp"),
    "fit again for 1ep, then for 3ba": longer(unshuffled),
    "fit again for 1ep, then for 3ba, shuffled": longer(data, named=SPINS),
}


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of numbers at the same place; infinite if one is missing."""
    if isinstance(one, Tensor):
        return float((one.double() - other.double()).abs().max())
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return float("inf")
        return max((difference(one[name], other[name]) for name in one), default=0.0)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return float("inf")
        return max(map(difference, one, other), default=0.0)
    if isinstance(one, str):
        return 0.0 if one == other else float("inf")
    return abs(float(one) - float(other))


def measure(case: Case) -> dict[str, Any]:
    composers, ours = case.composers(), case.ours()
    found: dict[str, Any] = {
        "weights": difference(composers.weights, ours.weights),
        "others": {
            name: difference(value, ours.others[name]) for name, value in composers.others.items()
        },
    }
    if ours.undisturbed is not None:
        found["from the undisturbed run"] = {
            "composer": composers.undisturbed,
            "automicro": ours.undisturbed,
        }
    if case.named:
        found["named"] = case.named
    return found


def is_exact(row: Mapping[str, Any]) -> bool:
    undisturbed = row.get("from the undisturbed run", {}).values()
    return not any((row["weights"], *row["others"].values(), *undisturbed))


def table(report: Mapping[str, Any]) -> str:
    """Return the rows of a report as Markdown, without removed jobs."""
    lines = ["| The same job in both | final weights | other numbers | |", "|---|---|---|---|"]
    cases = {name: row for name, row in report["cases"].items() if name in CASES}
    for name, row in cases.items():
        others = [f"{each} {value:.2g}" for each, value in row["others"].items()]
        if (apart := row.get("from the undisturbed run")) is not None:
            others.append(
                f"from the undisturbed run: Composer {apart['composer']:.2g}, "
                f"automicro {apart['automicro']:.2g}"
            )
        cells = (name, f"{row['weights']:.2g}", ", ".join(others) or "–", row.get("named", ""))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines).replace("|  |", "| |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="the jobs that have this in their name")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    repair_torchvision()
    torch.set_num_threads(1)
    versions = {"mosaicml": version_of("mosaicml"), "torchmetrics": version_of("torchmetrics")}
    report: dict[str, Any] = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "automicro": automicro.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **versions,
        "transformers": version_of("transformers"),
        "cases": {},
    }
    for name, case in CASES.items():
        if given.only in name:
            report["cases"][name] = measure(case)
            print(f"{name}: {json.dumps(report['cases'][name])}", flush=True)
    print(table(report))
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    unnamed = [n for n, row in report["cases"].items() if not is_exact(row) and "named" not in row]
    if unnamed:
        raise SystemExit(f"not the same, and not named: {', '.join(unnamed)}")


if __name__ == "__main__":
    main()
