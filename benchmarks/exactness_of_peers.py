"""Whether accumulation gives the gradient of the whole batch: peers against one batch, in float64.

    python -m benchmarks.exactness_of_peers

Each trains one optimizer step on the same rows: in two batches if it accumulates, or in one if it
splits batches itself. A cell is the largest difference of a weight from the step of one batch,
relative to the length of the step. Peers run as installed, with their defaults. The last table uses
a contrastive loss, which compares each row with all rows of its batch.
"""

import datetime
import importlib.metadata
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Contrastive, Microbatcher
from automicro.contrastive import InfoNCE

Rows = tuple[Tensor, Tensor]
Make = Callable[[], nn.Module]


class Model(nn.Module):
    """A classifier that computes its own loss, a mean over the targets that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.linear(inputs), labels)}


class Counting(Model):
    """The same, divided by the count that transformers' Trainer passes."""

    def forward(
        self, inputs: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Tensor]:
        total = F.cross_entropy(self.linear(inputs), labels, reduction="sum")
        return {"loss": total / (num_items_in_batch or (labels != -100).sum())}


class Pairs(Model):
    """The same layer as an encoder: each row must find its partner among those of all rows."""

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        anchors, partners = (F.normalize(self.linear(each)) for each in (inputs, labels))
        return {"loss": F.cross_entropy(anchors @ partners.T, torch.arange(len(anchors)))}


def make_jobs() -> dict[str, list[Rows]]:
    """Return pairs of batches: even ones, a shorter last one, and one with few counting targets."""
    drawn = torch.Generator().manual_seed(1)

    def rows(count: int) -> Rows:
        inputs = torch.randn(count, 6, dtype=torch.float64, generator=drawn)
        return inputs, torch.randint(3, (count,), generator=drawn)

    few = rows(8)
    few[1][2:] = -100
    return {
        "8 + 8 rows": [rows(8), rows(8)],
        "8 + 4 rows": [rows(8), rows(4)],
        "6 of 8 targets ignored": [rows(8), few],
    }


def make_pairs() -> list[Rows]:
    drawn = torch.Generator().manual_seed(2)
    rows = torch.randn(2, 2, 8, 6, dtype=torch.float64, generator=drawn)
    return [(inputs, partners) for inputs, partners in rows]


def in_one_batch(batches: Sequence[Rows]) -> Rows:
    inputs, labels = map(torch.cat, zip(*batches, strict=True))
    return inputs, labels


def by_hand(batches: Sequence[Rows], make: Make = Model) -> nn.Module:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for batch in batches:
        (model(*batch)["loss"] / len(batches)).backward()
    optimizer.step()
    return model


def with_accelerate(batches: Sequence[Rows], make: Make = Model) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(batches))
    model = make()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(*batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return model


def with_transformers(batches: Sequence[Rows], make: Make = Model) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    rows = [{"inputs": x, "labels": y} for batch in batches for x, y in zip(*batch, strict=True)]
    model = make()
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=len(batches[0][0]),
        gradient_accumulation_steps=len(batches),
        max_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_grad_norm=0.0,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, schedule))
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)  # type: ignore[method-assign]
    trainer.train()
    return model


def with_lightning(batches: Sequence[Rows], make: Make = Model) -> nn.Module:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make()

        def training_step(self, batch: Rows) -> Tensor:
            loss: Tensor = self.model(*batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module, loader = Module(), torch.utils.data.DataLoader[Any](list(batches), batch_size=None)  # type: ignore[arg-type]
    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=len(batches),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader)
    return module.model


def with_automicro(batches: Sequence[Rows]) -> nn.Module:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    microbatcher = Microbatcher(
        model,
        forward=lambda model, batch: model(*batch)["loss"],
        loss_average="tokens",
        microbatch_size=5,
    )
    microbatcher.backward(in_one_batch(batches))
    optimizer.step()
    return model


def with_sentence_transformers(batches: Sequence[Rows]) -> nn.Module:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    class Encoder(nn.Module):
        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"sentence_embedding": model.linear(features["inputs"])}

    model = Pairs()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    encoder = SentenceTransformer(modules=[Encoder()], device="cpu")
    cached = CachedMultipleNegativesRankingLoss(encoder, scale=1.0, mini_batch_size=5)
    cached([{"inputs": each} for each in in_one_batch(batches)], torch.empty(0)).backward()
    optimizer.step()
    return model


def with_contrastive(batches: Sequence[Rows]) -> nn.Module:
    model = Pairs()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    # A temperature of one, whose logarithm is exact, because torch keeps it in float32.
    loss = InfoNCE(1.0, trains_temperature=False, is_symmetric=False)
    towers = {"inputs": model.linear, "labels": model.linear}
    inputs, labels = in_one_batch(batches)
    outputs = Contrastive(towers, loss, microbatch_size=5)(inputs=inputs, labels=labels)
    outputs["loss"].backward()
    optimizer.step()
    return model


PEERS: dict[str, Callable[[Sequence[Rows]], nn.Module]] = {
    "loss / steps by hand": by_hand,
    "accelerate": with_accelerate,
    "transformers": with_transformers,
    "transformers, models that take the count": lambda rows: with_transformers(rows, Counting),
    "Lightning": with_lightning,
    "automicro, microbatches of 5": with_automicro,
}
OF_PAIRS: dict[str, Callable[[Sequence[Rows]], nn.Module]] = {
    "loss / steps by hand": lambda rows: by_hand(rows, Pairs),
    "accelerate": lambda rows: with_accelerate(rows, Pairs),
    "transformers": lambda rows: with_transformers(rows, Pairs),
    "Lightning": lambda rows: with_lightning(rows, Pairs),
    "sentence-transformers, cached, slices of 5": with_sentence_transformers,
    "automicro.Contrastive, slices of 5": with_contrastive,
}


def difference(model: nn.Module, batches: Sequence[Rows], make: Make = Model) -> float:
    """Return the distance from the step on all rows in one batch, relative to its length."""
    whole = by_hand([in_one_batch(batches)], make)
    before = make().state_dict()
    trained, right, start = (
        torch.cat([state[name].flatten() for name in before])
        for state in (model.state_dict(), whole.state_dict(), before)
    )
    return float((trained - right).abs().max() / (right - start).norm())


def of_pairs(train: Callable[[Sequence[Rows]], nn.Module]) -> str:
    batches = make_pairs()
    try:
        return f"{difference(train(batches), batches, Pairs):.0e}"
    except ImportError as error:
        return f"not installed: {error.name}"


def version_of(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"without {name}"


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    jobs = make_jobs()
    lines = [f"| One step beside one batch | {' | '.join(jobs)} |", "|---|" + "---|" * len(jobs)]
    for name, train in PEERS.items():
        cells = [f"{difference(train(batches), batches):.0e}" for batches in jobs.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| A contrastive loss | 8 + 8 pairs |", "|---|---|"]
    lines += [f"| {name} | {of_pairs(train)} |" for name, train in OF_PAIRS.items()]
    peers = ("accelerate", "transformers", "lightning", "sentence-transformers", "torch")
    lines += ["", f"{datetime.date.today()}, {', '.join(map(version_of, peers))}."]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
