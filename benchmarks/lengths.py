"""Rows of varying length: slices by cost against other approaches, on one machine in turns.

    python -m benchmarks.lengths [--rounds 6] [--json FILE]

Two jobs with log-normal lengths, whose mean is a quarter of the longest: a causal language model,
and a speech-like encoder with CTC. Each optimization batch of 48 rows is trained in every way, one
after the other, and the ways take turns in going first:

- *batch*: slices of as many rows as fit, padded to the longest row of the batch;
- *slice*: the same rows, each slice trimmed to its own longest, as a careful collate function does;
- *sorted*: batches of rows of similar length, from a loader that sorts the data set, each in
  slices of as many rows as fit, padded to the longest row of the batch. It trains on other
  batches, in which long rows come together;
- *cost*: ``microbatch_unit="tokens"``.

All have the same budget: a microbatch of at most four rows of the longest possible length.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Microbatcher, is_extra_pass
from automicro.features import MicrobatchUnit

ROWS, LONGEST, BUDGET_ROWS = 48, 256, 4
BUDGET = BUDGET_ROWS * LONGEST
WIDTH, HEADS, LAYERS, WORDS, FEATURES, LETTERS = 96, 4, 3, 512, 40, 29
WARM_UP = 12  # batches, in which the overhead is fitted as well


class Block(nn.Module):
    """Attention that ignores padding, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.outputs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        heads = self.inputs(self.before(hidden)).view(rows, length, 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        hidden = hidden + self.outputs(found.transpose(1, 2).flatten(2))
        changed: Tensor = self.narrow(F.gelu(self.wide(self.between(hidden))))
        return hidden + changed


class Blocks(nn.Module):
    """A stack of blocks."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.is_causal = is_causal

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        length = hidden.shape[1]
        seen = mask[:, None, None, :].expand(-1, 1, length, -1)
        if self.is_causal:
            seen = seen & torch.ones(length, length, dtype=torch.bool).tril()
        for layer in self.layers:
            hidden = layer(hidden, seen)
        return hidden


class Language(nn.Module):
    """Causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Embedding(LONGEST, WIDTH)
        self.blocks = Blocks(is_causal=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1])
        hidden = self.blocks(self.embed(input_ids) + self.place(places), attention_mask.bool())
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Speech(nn.Module):
    """Encoder from frames to letters, with connectionist temporal classification."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = Blocks(is_causal=False)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(
        self, audio: Tensor, audio_lengths: Tensor, labels: Tensor, label_lengths: Tensor
    ) -> Tensor:
        mask = torch.arange(audio.shape[1]) < audio_lengths[:, None]
        logits = self.head(self.blocks(self.stem(audio), mask))
        losses = F.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1),
            labels,
            audio_lengths,
            label_lengths,
            reduction="none",
            zero_infinity=True,
        )
        return losses.mean()


@dataclass(frozen=True, kw_only=True)
class Job:
    """One of the two jobs.

    Attributes:
        model: creates the model.
        collate: creates a batch of rows of these lengths.
        average: average of its loss.
        unit: unit of microbatch sizes.
    """

    model: Callable[[], nn.Module]
    collate: Callable[[list[int]], dict[str, Tensor]]
    average: str
    unit: Any


def lengths_of(count: int, seed: int) -> list[int]:
    """Draw log-normal lengths with a mean of a quarter of the longest; longer ones are redrawn."""
    drawn, found = torch.Generator().manual_seed(seed), list[int]()
    spread = 0.8
    middle = math.log(LONGEST / 4) - spread**2 / 2
    while len(found) < count:
        length = math.exp(middle + spread * float(torch.randn((), generator=drawn)))
        if 2 <= length <= LONGEST:
            found.append(round(length))
    return found


def texts(lengths: list[int]) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(WORDS, (len(lengths), max(lengths)), generator=drawn)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    labels = torch.where(mask == 1, ids.roll(-1, 1), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def sounds(lengths: list[int]) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(sum(lengths))
    letters = [max(1, length // 6) for length in lengths]
    return {
        "audio": torch.randn(len(lengths), max(lengths), FEATURES, generator=drawn),
        "audio_lengths": torch.tensor(lengths),
        "labels": torch.randint(1, LETTERS, (len(lengths), max(letters)), generator=drawn),
        "label_lengths": torch.tensor(letters),
    }


def cut(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Trim the padding common to all rows of a slice, as users do."""
    if "audio" in batch:
        frames, letters = int(batch["audio_lengths"].max()), int(batch["label_lengths"].max())
        return {
            **batch,
            "audio": batch["audio"][:, :frames],
            "labels": batch["labels"][:, :letters],
        }
    length = int(batch["attention_mask"].sum(1).max())
    return {name: tensor[:, :length] for name, tensor in batch.items()}


def whole(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    return model(**batch)


def own_length(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    return model(**cut(batch))


def by_cost(job: Job, model: nn.Module) -> Microbatcher:
    return Microbatcher(
        model,
        forward=whole,
        loss_average=job.average,
        microbatch_size=BUDGET,
        features=[MicrobatchUnit(job.unit)],
        probe=False,
    )


def by_rows(job: Job, model: nn.Module, rows: int, *, cuts: bool) -> Microbatcher:
    return Microbatcher(
        model,
        forward=own_length if cuts else whole,
        loss_average=job.average,
        microbatch_size=rows,
        probe=False,  # each would run its own check
    )


def frames(row: Mapping[str, Tensor]) -> float:
    """Return the cost of a sound; the cost of its letters is negligible."""
    return float(row["audio_lengths"])


JOBS = {
    "language": Job(model=Language, collate=texts, average="tokens", unit="tokens"),
    "speech": Job(model=Speech, collate=sounds, average="samples", unit=frames),
}


class Way:
    """Trains one model in one way."""

    def __init__(self, name: str, job: Job) -> None:
        torch.manual_seed(0)
        self.name, self.job = name, job
        self.model = job.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._by_rows: dict[int, Microbatcher] = {}
        self.by_cost = by_cost(job, self.model) if name == "cost" else None
        self.seconds: list[float] = []
        self.rows = 0
        self.slices = 0

    def step(self, lengths: list[int], *, counts: bool) -> float:
        """Train on one batch and return its seconds."""
        batch = self.job.collate(lengths)
        began = time.perf_counter()
        result = self.microbatcher(batch).backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - began
        if counts:
            self.seconds.append(seconds)
            self.rows += len(lengths)
            self.slices += result.num_microbatches
        return seconds

    def microbatcher(self, batch: Mapping[str, Tensor]) -> Microbatcher:
        if self.by_cost is not None:
            return self.by_cost
        padded = max(tensor.shape[1] for tensor in batch.values() if tensor.dim() > 1)
        rows = max(1, BUDGET // padded)
        if rows not in self._by_rows:
            cuts = self.name == "slice"
            self._by_rows[rows] = by_rows(self.job, self.model, rows, cuts=cuts)
        return self._by_rows[rows]

    @property
    def rows_per_second(self) -> float:
        return self.rows / sum(self.seconds)


def padding_share(job: Job, way: str, batches: list[list[int]]) -> float:
    """Return the share of computed positions that are padding."""
    real = computed = 0
    made = Way(way, job)
    seen: list[int] = []

    def note(_: nn.Module, __: Any, given: Mapping[str, Tensor]) -> None:
        if is_extra_pass():
            return
        first = given["input_ids"] if "input_ids" in given else given["audio"]
        seen.append(first.shape[0] * first.shape[1])

    for lengths in batches:
        batch = job.collate(lengths)
        handle = made.model.register_forward_pre_hook(note, with_kwargs=True)
        made.microbatcher(batch).backward(batch)
        handle.remove()
        real += sum(lengths)
        computed += sum(seen)
        seen.clear()
    return 1 - real / computed


def gradient_gap(job: Job) -> float:
    """Return the largest relative difference from the whole batch's gradient, in fp64."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model = job.model()
        batch = job.collate(lengths_of(ROWS, 99))
        batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        by_cost(job, model).backward(batch)
        ours = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        whole(model, batch).backward()
        plain = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return float((ours - plain).norm() / plain.norm())
    finally:
        torch.set_default_dtype(torch.float32)


def measure(name: str, rounds: int) -> dict[str, Any]:
    job = JOBS[name]
    ways = {way: Way(way, job) for way in ("batch", "slice", "sorted", "cost")}
    batches = [lengths_of(ROWS, seed) for seed in range(WARM_UP + rounds)]
    # A loader that sorts: the same rows in shuffled batches of neighbors by length.
    every = sorted(length for each in batches[WARM_UP:] for length in each)
    similar = [every[begin : begin + ROWS] for begin in range(0, len(every), ROWS)]
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    for index, lengths in enumerate(batches):
        counts = index >= WARM_UP
        took: dict[str, float] = {}
        for way in list(ways)[index % 4 :] + list(ways)[: index % 4]:
            is_sorted = way == "sorted" and counts
            rows = similar[(index - WARM_UP) * 7 % len(similar)] if is_sorted else lengths
            took[way] = ways[way].step(rows, counts=counts)
        if counts:
            for way, seconds in took.items():
                ratios[way].append(seconds / took["cost"])
    made = ways["cost"].by_cost
    assert made is not None
    found: dict[str, Any] = {
        "gradient_gap_fp64": gradient_gap(job),
        "fitted_overhead": made.state_dict()["train"]["overhead"]["fitted"],
        "ways": {},
    }
    for way, each in ways.items():
        given = similar if way == "sorted" else batches[WARM_UP:]
        share = padding_share(job, way, given)
        found["ways"][way] = {
            "rows_per_second": each.rows_per_second,
            "rows_per_batch": ROWS,
            "tokens_per_row": statistics.fmean(map(statistics.fmean, given)),
            "microbatches": each.slices / len(each.seconds),
            "padding": share,
            "cost_is_faster": ways["cost"].rows_per_second / each.rows_per_second,
            "of_pairs": quartiles(ratios[way]) if way != "sorted" else None,
        }
    return found


def quartiles(values: list[float]) -> list[float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return [round(each, 3) for each in (low, middle, high)]


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield "| job | way | rows/s | microbatches | padding | by cost is faster |"
    yield "|---|---|---|---|---|---|"
    for job, each in found.items():
        for way, told in each["ways"].items():
            spread = ""
            if told["of_pairs"] and way != "cost":
                low, _, high = told["of_pairs"]
                spread = f" ({low:.2f}…{high:.2f})"
            yield (
                f"| {job} | {way} | {told['rows_per_second']:.1f} | {told['microbatches']:.1f} | "
                f"{told['padding']:.0%} | {told['cost_is_faster']:.2f}×{spread} |"
            )


def draw(found: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw where the time of a thousand rows goes, by the measured cost of a slice."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    all_axes = figure.subplots(1, len(found))
    for axes, (job, each) in zip(all_axes, found.items(), strict=True):
        overhead = each["fitted_overhead"]
        for place, told in enumerate(each["ways"].values()):
            seconds = 1000 / told["rows_per_second"]
            real = told["tokens_per_row"] * told["rows_per_batch"]
            parts = {
                "tokens": real,
                "padding": real / (1 - told["padding"]) - real,
                "what a slice costs": overhead * told["microbatches"],
            }
            begin = 0.0
            for number, (name, part) in enumerate(parts.items()):
                long = seconds * part / sum(parts.values())
                label = name if place == 0 else None
                axes.barh(place, long, left=begin, color=f"C{number}", label=label)
                begin += long
            axes.text(begin, place, f" {told['rows_per_second']:.0f} rows/s", va="center")
        axes.set_yticks(range(len(each["ways"])), each["ways"])
        axes.invert_yaxis()
        axes.set_title(job)
        axes.set_xlabel("seconds for 1,000 rows")
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24, help="batches of each way that count")
    parser.add_argument("--json", type=pathlib.Path, help="where the raw figures go")
    parser.add_argument("--picture", type=pathlib.Path, help="where a picture of them goes")
    arguments = parser.parse_args()
    found = {name: measure(name, arguments.rounds) for name in JOBS}
    print("\n".join(lines(found)))
    for name, each in found.items():
        print(
            f"{name}: gradient {each['gradient_gap_fp64']:.1e} from the whole batch's in fp64; "
            f"a slice costs {each['fitted_overhead']} beside its content"
        )
    if arguments.picture is not None:
        draw(found, arguments.picture)
    if arguments.json is not None:
        told = {
            "date": datetime.date.today().isoformat(),
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "rounds": arguments.rounds,
            "jobs": found,
        }
        arguments.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
