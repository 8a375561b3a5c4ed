"""Draw how microbatch sizes follow memory, as the picture in docs/sizes.md.

    OMP_NUM_THREADS=1 python docs/draw_sizes.py

A real training under a simulated memory limit: a small transformer on batches of 64 rows, every
tenth of them long, while a neighbour takes memory and gives it back.
"""

import json
import pathlib
import sys
import typing
from typing import Any

import torch
from torch import Tensor, nn

from automicro import Halving, Trainer
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.features import RememberSizes
from automicro.memory.device import read_counts
from automicro.step.results import StepResult

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "images" / "sizes.json"
PICTURE = DATA.with_suffix(".svg")

ROWS, SHORT, LONG, LONG_EVERY = 64, 16, 48, 10
BATCHES = 120
LIMIT = 3584 << 10
NEIGHBOUR = 2304 << 10
ARRIVES, LEAVES = 40, 80


class Reader(nn.Module):
    """A transformer of one layer that reads tokens and names a class."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(32, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True)
        self.head = nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embedding(tokens)).mean(1))
        return logits


class Neighbour(Callback):
    """Holds memory at some batches.

    Args:
        num_bytes: to hold.
        is_there: tells of the number of a batch whether it holds them.
    """

    def __init__(self, num_bytes: int, is_there: typing.Callable[[int], bool]) -> None:
        self._num_bytes = num_bytes
        self._is_there = is_there
        self._held: Tensor | None = None

    @property
    def held_bytes(self) -> int:
        return 0 if self._held is None else self._held.numel()

    def batch_start(self, run: Run, batch: Any) -> None:
        if not self._is_there(run.state.batch):
            self._held = None
        elif self._held is None:
            self._held = torch.zeros(self._num_bytes, dtype=torch.uint8)


class Recorder(Callback):
    """Notes what became of each batch."""

    def __init__(self, neighbour: Neighbour) -> None:
        self.batches: list[dict[str, Any]] = []
        self._neighbour = neighbour
        self._length = 0

    def batch_start(self, run: Run, batch: Any) -> None:
        self._length = batch[0].shape[1]

    def batch_end(self, run: Run, result: StepResult) -> None:
        self.batches.append(
            {
                "length": self._length,
                "microbatch_size": result.microbatch_size,
                "num_microbatches": result.num_microbatches,
                "failed_sizes": list(result.failed_sizes),
                "peak_bytes": read_counts(run.device).peak_bytes,
                "neighbour_bytes": self._neighbour.held_bytes,
            }
        )


def text(batches: int, *, long_every: int = LONG_EVERY) -> list[tuple[Tensor, Tensor]]:
    """Batches of tokens, some of them long."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for number in range(batches):
        length = LONG if number % long_every == long_every - 1 else SHORT
        tokens = torch.randint(32, (ROWS, length), generator=generator)
        found.append((tokens, tokens[:, 0] % 4))
    return found


def trace(
    batches: int = BATCHES,
    is_there: typing.Callable[[int], bool] = lambda batch: ARRIVES <= batch < LEAVES,
    *,
    long_every: int = LONG_EVERY,
    limit: int = LIMIT,
    neighbour_bytes: int = NEIGHBOUR,
    microbatch_size: Any = "auto",
) -> dict[str, Any]:
    """Train, and return what became of each batch, and how often the optimizer stepped."""
    neighbour = Neighbour(neighbour_bytes, is_there)
    recorder = Recorder(neighbour)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps: list[None] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(None))
    Trainer(
        model,
        text(batches, long_every=long_every),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        callbacks=[neighbour, recorder],
        memory_limit=limit,
        microbatch_size=microbatch_size,
        features=[RememberSizes(False)],
        device="cpu",
        progress=False,
    ).fit()
    return {"rows": ROWS, "limit_bytes": limit, "steps": len(steps), "batches": recorder.batches}


def draw(data: dict[str, Any], picture: pathlib.Path) -> None:
    """Draw the memory above, and the microbatches below."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "automicro"
    from matplotlib import pyplot

    batches = data["batches"]
    numbers = range(len(batches))
    mib = [[each[name] / 2**20 for each in batches] for name in ("neighbour_bytes", "peak_bytes")]
    figure, (memory, sizes) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 5.4), layout="constrained"
    )
    memory.axhline(data["limit_bytes"] / 2**20, color="#c0392b", label="limit")
    memory.step(numbers, mib[1], where="mid", color="#1f5fa8", label="peak of the batch")
    memory.fill_between(
        numbers, mib[0], step="mid", color="#e0a030", alpha=0.6, label="of it the neighbour's"
    )
    memory.set(ylabel="memory (MiB)", ylim=(0, None))
    memory.legend(loc="lower right")
    counts = [each["num_microbatches"] for each in batches]
    halving = [each["num_microbatches"] for each in data["halving"]]
    sizes.step(numbers, halving, where="mid", color="#b0b0b0", label="halving alone")
    sizes.step(numbers, counts, where="mid", color="#1f5fa8", linewidth=0.8)
    for is_long, name, marker in ((False, "short rows", "o"), (True, "long rows", "^")):
        chosen = [number for number in numbers if (batches[number]["length"] > SHORT) == is_long]
        sizes.scatter(chosen, [counts[each] for each in chosen], s=14, marker=marker, label=name)
    failed = [number for number in numbers if batches[number]["failed_sizes"]]
    tried = [
        (number, -(-data["rows"] // size))
        for number in failed
        for size in batches[number]["failed_sizes"]
    ]
    sizes.scatter(*zip(*tried, strict=True), marker="x", color="#c0392b", label="ran out, retried")
    sizes.set(ylabel="microbatches of the batch", xlabel="batch", ylim=(0.5, None))
    sizes.legend(loc="upper right")
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    data = trace()
    data["halving"] = trace(microbatch_size=Halving(refine=False))["batches"]
    lines = {name: json.dumps(value) for name, value in data.items()}
    for name in ("batches", "halving"):
        lines[name] = lines[name].replace("[{", "[\n{").replace("}, {", "},\n{")
    inside = ",\n".join(f'"{name}": {value}' for name, value in lines.items())
    DATA.write_text(f"{{\n{inside}\n}}\n", encoding="utf-8")
    draw(data, PICTURE)
    sys.stdout.write(f"wrote {DATA.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
