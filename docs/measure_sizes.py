"""Measure benchmarks/results/measured_sizes.md: small models on devices simulated on the CPU.

    OMP_NUM_THREADS=1 python docs/measure_sizes.py

Every model trains a few steps under each limit with microbatch_size="auto", in a `Trainer`, which
remembers what it found. The table has the first columns of `automicro cache`; a second run of each
starts from it.
"""

import os
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from automicro import FitSummary, Trainer
from automicro.cli.commands.cache import COLUMNS, cells
from automicro.demo import digits, topics
from automicro.remembered.cache import RememberedSize, SizeCache

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "results" / "measured_sizes.md"
STEPS = 12
HEAD = """\
# Measured microbatch sizes

Written by `python docs/measure_sizes.py`. **The devices are simulated on a CPU**: a
[`MemoryBudget`](../../docs/guarantees.md) of the size in the table, which counts what tensors
hold and knows no fragmentation. Training in fp32 with AdamW; each line is what a `Trainer` with
`microbatch_size="auto"` had remembered after {steps} steps, with the peak of a batch at that size,
forward and backward.
[Remembered sizes](../../docs/sizes.md#remembered-sizes) tells how to get such a
table of your own models and devices.
"""


@dataclass(frozen=True)
class Job:
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    limits: tuple[str, ...]
    loss_fn: nn.Module | None = None


class MLP(nn.Module):
    """Three layers over flat images."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, digits.NUM_CLASSES),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


class Residual(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(8, channels),
            nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(8, channels),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(images + self.body(images))


class SmallResNet(nn.Sequential):
    """Three stages of residual blocks on images of 32×32, with GroupNorm."""

    def __init__(self, *, width: int = 16) -> None:
        parts: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for stage in range(3):
            parts.append(Residual(width << stage))
            if stage < 2:
                parts.append(nn.Conv2d(width << stage, width << (stage + 1), 3, 2, padding=1))
        super().__init__(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=1024, n_positions=64, n_embd=128, n_layer=4, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    config.num_labels = 4
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def docs_lm() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128, tie_word_embeddings=True,
        use_cache=False, bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def digits_batch(rows: int = 512) -> Any:
    return next(iter(digits.loader("train", batch_size=rows)))


def images() -> Any:
    return torch.randn(64, 3, 32, 32), torch.randint(10, (64,))


def text(classes: int | None = None) -> dict[str, Tensor]:
    ids = torch.randint(1024, (48, 64))
    return {"input_ids": ids, "labels": ids if classes is None else torch.randint(classes, (48,))}


def docs_batch() -> Any:
    return next(iter(topics.loader("train", batch_size=64, max_length=128, seed=0)))


JOBS = (
    Job(MLP, lambda: digits_batch(1437), ("8MiB", "10MiB", "24MiB"), nn.CrossEntropyLoss()),
    Job(digits.CNN, digits_batch, ("16MiB", "32MiB", "64MiB"), nn.CrossEntropyLoss()),
    Job(SmallResNet, images, ("16MiB", "32MiB", "64MiB"), nn.CrossEntropyLoss()),
    Job(docs_lm, docs_batch, ("12MiB", "24MiB", "48MiB")),
    Job(bert, lambda: text(4), ("32MiB", "48MiB", "96MiB")),
    Job(gpt2, text, ("32MiB", "48MiB", "96MiB")),
)


def train(job: Job, limit: str, *, steps: int) -> FitSummary:
    """Train a few steps under a limit; what the run finds it remembers."""
    torch.manual_seed(0)
    return Trainer(
        job.make(),
        [job.batch()],
        loss_fn=job.loss_fn,
        optimizer=torch.optim.AdamW,
        memory_limit=limit,
        max_duration=f"{steps}ba",
        device="cpu",
        progress=False,
    ).fit()


NUMBERS = (
    *("parameters", "batch (rows)", "microbatch size (rows)", "microbatches", "peak memory"),
)
MEASURED = 9  # columns: the others tell runs apart


def as_markdown(sizes: Sequence[RememberedSize]) -> str:
    """The table, with when and with which versions it was measured."""
    titles = list(COLUMNS)[:MEASURED]
    rules = ["--:" if title in NUMBERS else "---" for title in titles]
    rows = [titles, rules, *(row[:MEASURED] for row in cells(sizes))]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    named = sorted({"automicro {automicro} on torch {torch}".format(**s.key) for s in sizes})
    when = sorted(row[list(COLUMNS).index("written")] for row in cells(sizes))
    dates = " to ".join(dict.fromkeys((when[0], when[-1])))
    return "\n".join([*lines, "", f"Measured {dates} with {', '.join(named)}.", ""])


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOMICRO_CACHE"] = folder
        for job in JOBS:
            for limit in job.limits:
                first = train(job, limit, steps=STEPS)
                again = train(job, limit, steps=1)
                sys.stdout.write(
                    f"{job.make.__name__} {limit}: {first.microbatch_size} rows after "
                    f"{first.train_ooms} failed attempts, {again.microbatch_size} after "
                    f"{again.train_ooms} in a second run\n"
                )
        table = as_markdown(SizeCache().entries())
    PAGE.write_text(f"{HEAD.format(steps=STEPS)}\n{table}", encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
