"""Out-of-memory errors that other trainers survive, and the state they leave.

    python -m benchmarks.faults_of_peers

Each trains six batches of 16 rows on the CPU. One place runs out of memory with more than four
rows, as a device would: the forward (from the first batch, or from the third), the backward or the
evaluation; or the first optimizer step does. A cell says whether training ended well, and with how
many rows per step. The last rows compare the state after failures in the forward, bit by bit, with
a run of the same size that never failed. Peers that cannot be imported are listed as not run.
"""

import dataclasses
import datetime
import importlib
import importlib.metadata
import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from automicro import Microbatcher
from benchmarks.sizes_of_peers import repair_torchvision

BATCH, BATCHES, FITS = 16, 6, 4
PLACES = FORWARD, LATE, BACKWARD, STEP, EVALUATION = (
    "forward",
    "forward, from the third batch on",
    "backward",
    "first optimizer step",
    "evaluation",
)
NOWHERE = ""


@dataclasses.dataclass
class Fault:
    """The place where memory runs out, and the rows that optimizer steps saw.

    Attributes:
        rows_of_steps: rows of forwards since the previous step.
        largest: rows of the largest forward that fitted in training.
    """

    place: str
    rows_of_steps: list[int] = dataclasses.field(default_factory=list)
    rows: int = 0
    largest: int = 0

    def check(self, place: str, rows: int) -> None:
        if self.place == LATE and place == FORWARD and len(self.rows_of_steps) >= 2:
            place = LATE
        if place == self.place and rows > FITS:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


class Backward(torch.autograd.Function):
    """Identity that runs out of memory in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.fault.check(BACKWARD, len(gradients[0]))
        return gradients[0], None


class Net(nn.Module):
    """Model with state that a failure can spoil: statistics, draws, a metric, gradients."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        # Might need the repair.
        self.seen: Any = importlib.import_module("torchmetrics").SumMetric()
        self.fault = fault

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.first(inputs))
        if self.training:
            torch.rand(1)  # without effect, so that each row of the table has its own cause
            self.seen.update(len(inputs))
        self.fault.check(FORWARD if self.training else EVALUATION, len(inputs))
        if self.training:
            self.fault.rows += len(inputs)
            self.fault.largest = max(self.fault.largest, len(inputs))
        return {"loss": F.cross_entropy(self.last(Backward.apply(hidden, self.fault)), labels)}  # type: ignore[no-untyped-call]


class NotRunError(Exception):
    """A peer that cannot do this here."""


Train = Callable[[Fault, int], Net]


class Steps(torch.optim.SGD):
    """Optimizer whose first step runs out of memory if that is the fault."""

    def __init__(self, model: nn.Module, fault: Fault) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.fault = fault

    def step(self, closure: Any = None) -> Any:
        if self.fault.place == STEP:
            self.fault.place = NOWHERE
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        loss = super().step(closure)  # a closure might run out of memory: then no step was taken
        self.fault.rows_of_steps.append(self.fault.rows)
        self.fault.rows = 0
        return loss


def dataset() -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    rows = BATCHES * BATCH
    inputs = torch.randn(rows, 6, generator=drawn)
    return TensorDataset(inputs, torch.randint(3, (rows,), generator=drawn))


def loader(size: int) -> "DataLoader[Any]":
    # BatchNorm refuses a last batch of one row.
    return DataLoader(dataset(), batch_size=size, drop_last=True, generator=torch.Generator())


def by_hand(fault: Fault, size: int) -> Net:
    model = Net(fault)
    optimizer = Steps(model, fault)
    for batch in loader(size):
        optimizer.zero_grad()
        model(*batch)["loss"].backward()
        optimizer.step()
    with torch.no_grad():
        model.eval()(*next(iter(loader(size))))
    return model


def with_accelerate(fault: Fault, size: int) -> Net:
    from accelerate.utils import find_executable_batch_size

    def train(batch_size: int) -> Net:
        fault.rows_of_steps.clear()  # a new model, as accelerate's manual does
        return by_hand(fault, batch_size)

    model: Net = find_executable_batch_size(train, starting_batch_size=size)()
    return model


def with_transformers(fault: Fault, size: int) -> Net:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    rows = [{"inputs": x, "labels": y} for x, y in zip(*dataset().tensors, strict=True)]
    model = Net(fault)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        auto_find_batch_size=True,
        per_device_train_batch_size=size,
        dataloader_drop_last=True,
        per_device_eval_batch_size=size,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    optimizer = Steps(model, fault)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, optimizers=(optimizer, schedule)
    )
    trainer.remove_callback(PrinterCallback)
    trainer._get_train_sampler = lambda *_: SequentialSampler(rows)  # type: ignore[method-assign]
    trainer.train()
    trainer.evaluate()
    return model


def with_lightning(fault: Fault, size: int) -> Net:
    import lightning.pytorch as pl
    from lightning.pytorch.tuner.tuning import Tuner

    class Job(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = Net(fault), size

        def train_dataloader(self) -> "DataLoader[Any]":
            return loader(self.batch_size)

        def val_dataloader(self) -> "DataLoader[Any]":
            return loader(self.batch_size)

        def training_step(self, batch: Any) -> Tensor:
            loss: Tensor = self.model(*batch)["loss"]
            return loss

        def validation_step(self, batch: Any) -> None:
            self.model(*batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Steps(self.model, fault)

    def trainer() -> pl.Trainer:
        return pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tempfile.mkdtemp(),
        )

    job = Job()
    # The search tries training steps only, not evaluation.
    if fault.place not in (NOWHERE, EVALUATION):
        Tuner(trainer()).scale_batch_size(job, mode="binsearch", init_val=size, max_trials=6)
        fault.rows_of_steps.clear()
    trainer().fit(job)
    return job.model


def with_composer(fault: Fault, size: int) -> Net:
    if fault.place == EVALUATION:
        raise NotRunError("Composer finds sizes of evaluation with a GPU only")
    composer = importlib.import_module("composer")
    checks: Any = importlib.import_module("composer.trainer.trainer")
    checks._is_auto_microbatching = lambda size, device=None: size == "auto"  # also without a GPU

    class Job(composer.ComposerModel):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Net(fault)

        def forward(self, batch: Any) -> Any:
            return self.model(*batch)["loss"]

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs

        def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
            return self(batch)

        def update_metric(self, *_: Any) -> None: ...

    job = Job()
    trainer = composer.Trainer(
        model=job,
        train_dataloader=loader(BATCH),
        eval_dataloader=composer.Evaluator(
            label="eval",
            dataloader=loader(BATCH),
            metric_names=[],
            device_eval_microbatch_size=size,
        ),
        optimizers=Steps(job.model, fault),
        max_duration="1ep",
        seed=0,  # otherwise each run draws one
        eval_interval="1ep",
        device="cpu",
        device_train_microbatch_size="auto" if fault.place else size,
        progress_bar=False,
        log_to_console=False,
    )
    trainer.fit()
    trainer.close()
    return job.model


def with_automicro(fault: Fault, size: int) -> Net:
    model = Net(fault)
    optimizer = Steps(model, fault)
    microbatcher = Microbatcher(
        model,
        forward=lambda model, batch: model(*batch)["loss"],
        loss_average="samples",
        optimizer=optimizer,
        microbatch_size="auto" if fault.place else size,
        probe=False,
    )
    for batch in loader(BATCH):
        optimizer.zero_grad()
        microbatcher.backward(batch)
        optimizer.step()
    microbatcher.evaluate(next(iter(loader(BATCH))))
    return model


PEERS: dict[str, tuple[str, Train]] = {
    "automicro": ("automicro", with_automicro),
    "by hand": ("torch", by_hand),
    "accelerate": ("accelerate", with_accelerate),
    "transformers": ("transformers", with_transformers),
    "Lightning": ("lightning", with_lightning),
    "Composer": ("composer", with_composer),
}


LEFT = ("BatchNorm's statistics", "random numbers", "a metric", "weights")


def survived(train: Train, place: str) -> str:
    fault = Fault(place)
    try:
        train(fault, BATCH)
    except NotRunError:
        return "not run"
    except Exception as error:
        is_plain = type(error) is torch.OutOfMemoryError
        return "dies" if is_plain else type(error).__name__
    return f"{max(fault.rows_of_steps[-2:])} rows"  # the last batch of an epoch can be shorter


def state(model: Net) -> tuple[list[Tensor], ...]:
    """Return the compared state of a run, in the order of `LEFT`."""
    return (
        list(model.norm.buffers()),
        [torch.get_rng_state()],
        [model.seen.compute()],
        [each.detach() for each in model.parameters()],
    )


def left(train: Train) -> list[str]:
    """Compare with the state after a run of the same size that never failed."""
    fault = Fault(FORWARD)
    try:
        after = state(train(fault, BATCH))
    except torch.OutOfMemoryError:
        return ["dies"] * len(LEFT)
    size = min(fault.largest, fault.rows_of_steps[-1])
    undisturbed, again = (state(train(Fault(NOWHERE), size)) for _ in range(2))
    return [compared(*each) for each in zip(after, undisturbed, again, strict=True)]


def compared(after: list[Tensor], undisturbed: list[Tensor], again: list[Tensor]) -> str:
    if not all(map(torch.equal, undisturbed, again)):
        return "cannot be told"  # two runs without a failure also differ
    return "as before" if all(map(torch.equal, after, undisturbed)) else "other"


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    repair_torchvision()
    columns: dict[str, list[str]] = {}
    versions = [f"torch {torch.__version__}"]
    for name, (module, train) in PEERS.items():
        try:
            imported = importlib.import_module(module)
        except Exception as error:  # a broken installation can fail in any way
            print(f"{name}: not run ({type(error).__name__}: {error})")
            continue
        if train not in (by_hand, with_automicro):
            versions.append(f"{name} {imported.__version__}")
        columns[name] = [*(survived(train, each) for each in PLACES), *left(train)]
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for row, cells in zip((*PLACES, *LEFT), zip(*columns.values(), strict=True), strict=True):
        print(f"| {row} | {' | '.join(cells)} |")
    print(f"\n{datetime.date.today()}, {', '.join(versions)}.")


if __name__ == "__main__":
    main()
