"""Overhead of automicro inside other trainers, compared with these trainers alone, in turn.

    python -m benchmarks.hosts [lightning …] [--steps 60] [--json FILE]

A host trains twice at once, each time in its own thread: alone, and with automicro. A loader gives
each of them its batch in turn and measures the time until it asks for the next, so both use the
same machine: wall-clock time, and CPU time, which other processes disturb less. In half of the
rounds automicro goes first, because memory of threads differs by more than the effect measured
here; ``--control`` compares the host alone with itself. Two comparisons: a batch in one piece, and
the host's own accumulation in eight pieces against eight microbatches. Where bits must be equal
they are compared.
"""

import argparse
import json
import pathlib
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.overhead import median_with_interval

GOAL_WHOLE, GOAL_PIECES = 1.02, 1.0
PIECES = 8
ROWS, WIDTH, LENGTH = 32, 256, 152
WARM_UP = 4  # steps: checks of a few rows come first
ROUNDS = 4

Batch = tuple[Tensor, Tensor]


def make_model() -> nn.Module:
    """Return a small transformer whose step takes about 0.2 s."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(WIDTH * LENGTH, 10))


def make_batches(count: int) -> list[Batch]:
    """Return batches of `ROWS` rows."""
    drawn = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(ROWS, LENGTH, WIDTH, generator=drawn),
            torch.randint(10, (ROWS,), generator=drawn),
        )
        for _ in range(count)
    ]


class Turns:
    """Lets threads run one after the other."""

    def __init__(self, count: int) -> None:
        self._condition = threading.Condition(threading.RLock())
        self._waiting, self._at = list(range(count)), 0
        self.failed = False

    def wait(self, number: int) -> None:
        """Wait for this thread's turn.

        Raises:
            RuntimeError: another thread failed, and its turn would never end.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._at == number or self.failed)
        if self.failed:
            raise RuntimeError("the other trainer failed")

    def pass_on(self) -> None:
        """Let the next thread run."""
        with self._condition:
            after = [each for each in self._waiting if each > self._at]
            self._at = (after or self._waiting or [0])[0]
            self._condition.notify_all()

    def leave(self, number: int) -> None:
        """Let the others continue without this one: no host asks again after the last batch."""
        with self._condition:
            self._waiting.remove(number)
            if self._at == number:
                self.pass_on()

    def fail(self) -> None:
        """End all waiting."""
        with self._condition:
            self.failed = True
            self._condition.notify_all()


class Loader:
    """Yields batches in turn, whole or in pieces, and measures the time of each.

    Args:
        batches: batches of the run.
        pieces: number of pieces per batch.
        turns: shared with the other loader.
        number: index of this loader.
    """

    def __init__(self, batches: Sequence[Batch], pieces: int, turns: Turns, number: int) -> None:
        self._batches, self._pieces = batches, pieces
        self._turns, self._number = turns, number
        self.seconds: list[tuple[float, float]] = []  # wall-clock time and CPU time

    def __len__(self) -> int:
        return len(self._batches) * self._pieces

    def __iter__(self) -> Iterator[Batch]:
        for x, y in self._batches:
            self._turns.wait(self._number)
            start = time.perf_counter(), time.process_time()
            yield from zip(x.chunk(self._pieces), y.chunk(self._pieces), strict=True)
            clock, processor = time.perf_counter() - start[0], time.process_time() - start[1]
            self.seconds.append((clock, processor))
            self._turns.pass_on()


Train = Callable[[nn.Module, Loader, int, int | None], None]
"""Trains a model on what a loader gives, accumulating so many batches; None for the host alone,
else the rows of a microbatch, 0 for ``"auto"``."""


def lightning(model: nn.Module, loader: Loader, accumulated: int, size: int | None) -> None:
    """Train with Lightning's Trainer."""
    import lightning.pytorch as pl

    from automicro.integrations.lightning import AutoMicrobatch

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    pl.Trainer(
        callbacks=[] if size is None else [AutoMicrobatch(microbatch_size=size or "auto")],
        accumulate_grad_batches=accumulated,
        max_epochs=1,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader)


def transformers(model: nn.Module, loader: Loader, accumulated: int, size: int | None) -> None:
    """Train with Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments
    from transformers.utils import logging

    from automicro.integrations.transformers import enable

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.net(rows), labels)}

    class Named:
        """The loader's batches by the names of the model's arguments."""

        dataset = [None] * (len(loader) * ROWS // accumulated)

        def __len__(self) -> int:
            return len(loader)

        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return ({"rows": rows, "labels": labels} for rows, labels in loader)

    class Given(Trainer):  # type: ignore[misc, unused-ignore]
        def get_train_dataloader(self) -> Any:
            return Named()

    logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
    arguments = TrainingArguments(
        gradient_accumulation_steps=accumulated,
        num_train_epochs=1,
        learning_rate=1e-4,
        logging_steps=10**6,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Given(Model(), arguments, train_dataset=Named.dataset)  # type: ignore[arg-type, unused-ignore]
    if size is not None:
        enable(trainer, microbatch_size=size or "auto")
    trainer.train()


def accelerate(model: nn.Module, loader: Loader, accumulated: int, size: int | None) -> None:
    """Train in a loop with accelerate."""
    from accelerate import Accelerator

    from automicro.integrations.accelerate import microbatcher

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    step = None
    if size is not None:
        step = microbatcher(
            accelerator,
            model,
            optimizer,
            loss_fn=nn.CrossEntropyLoss(),
            microbatch_size=size or "auto",
        )
    for rows, labels in loader:
        with accelerator.accumulate(model):
            if step is None:
                accelerator.backward(F.cross_entropy(model(rows), labels))
            else:
                step.backward((rows, labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


HOSTS: dict[str, Train] = {
    "transformers": transformers,
    "lightning": lightning,
    "accelerate": accelerate,
}


Times = list[tuple[float, float]]


def run_both(
    train: Train, steps: int, pieces: int, *, ours: int, is_control: bool
) -> tuple[Times, Times, float]:
    """Return the times of the host alone and of the other run, and the distance of parameters.

    Args:
        train: one of the hosts.
        steps: number of steps after warm-up.
        pieces: number of pieces per batch.
        ours: which of the two has automicro, or would have it.
        is_control: whether both are the host alone.
    """
    batches = make_batches(steps + WARM_UP)
    turns = Turns(2)
    cuts = [pieces, pieces]
    if not is_control:
        cuts[ours] = 1  # automicro splits its batches itself
    loaders = [Loader(batches, cut, turns, number) for number, cut in enumerate(cuts)]
    models = [make_model(), make_model()]
    failures: list[BaseException] = []

    def run(number: int) -> None:
        size = None if number != ours or is_control else 0 if pieces == 1 else ROWS // pieces
        try:
            turns.wait(number)  # they must not import at once
            train(models[number], loaders[number], cuts[number], size)
            turns.leave(number)
        except BaseException as error:
            failures.append(error)
            turns.fail()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    alone, beside = (loaders[each].seconds[WARM_UP:-1] for each in (1 - ours, ours))
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    gap = max(float((one - other).detach().abs().max()) for one, other in pairs)
    return alone, beside, gap


def compare(train: Train, steps: int, pieces: int, *, is_control: bool = False) -> dict[str, Any]:
    """Return the time of a step with automicro relative to the host alone."""
    alone: Times = []
    beside: Times = []
    gap = 0.0
    for number in range(ROUNDS):
        found = run_both(
            train, steps // ROUNDS + 1, pieces, ours=(number + 1) % 2, is_control=is_control
        )
        alone += found[0]
        beside += found[1]
        gap = max(gap, found[2])
    if (pieces == 1 or is_control) and gap:
        raise AssertionError(f"parameters differ by {gap}, although no batch was cut")
    result: dict[str, Any] = {"pieces": pieces, "pairs": len(beside), "largest_gap": gap}
    for place, name in enumerate(("clock", "processor")):
        ratios = [one[place] / other[place] for one, other in zip(beside, alone, strict=True)]
        middle, low, high = median_with_interval(ratios)
        seconds = statistics.median(each[place] for each in alone)
        result[name] = {"ratio": middle, "interval": [low, high], "seconds_alone": seconds}
    return result


def main() -> None:
    """Compare the named hosts, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("hosts", nargs="*", choices=[[], *HOSTS], metavar="HOST")
    parser.add_argument("--steps", type=int, default=60, help="of each, in all rounds together")
    parser.add_argument("--control", action="store_true", help="the host alone, and once more")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    for name in arguments.hosts or HOSTS:
        found[name] = [
            compare(HOSTS[name], arguments.steps, pieces, is_control=arguments.control)
            for pieces in (1, PIECES)
        ]
        for each, goal in zip(found[name], (GOAL_WHOLE, GOAL_PIECES), strict=True):
            for clock in ("clock", "processor"):
                of_clock = each[clock]
                low, high = of_clock["interval"]
                print(
                    f"{name}, {each['pieces']} × {ROWS // each['pieces']} rows, {clock}: "
                    f"×{of_clock['ratio']:.3f} ({low:.3f} to {high:.3f}) of "
                    f"{of_clock['seconds_alone']:.3f} s; goal ×{goal}",
                    flush=True,
                )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
