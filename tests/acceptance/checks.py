"""Verdicts of the table of checks; ``python -m tests.acceptance.checks`` rewrites `checks.md`.

Each row runs on split batches, like user code. In float64, its gradients, losses, buffers and
outputs are compared with those of a loop in plain torch, so that "wrong" is measured.
"""

import collections
import contextlib
import dataclasses
import enum
import functools
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from automicro import Microbatcher
from automicro.errors import AutomicroWarning
from automicro.features import with_features
from tests.acceptance.right import RIGHT
from tests.acceptance.rows import Job, Row
from tests.acceptance.searched import SEARCHED
from tests.acceptance.wrong import WRONG
from tests.oracle.judging import UNCHECKED, relative_error
from tests.oracle.runs import is_refusal
from tests.torture.engine.sweep import quiet

TABLE: dict[str, Row] = {**WRONG, **RIGHT, **SEARCHED}
FILE = Path(__file__).with_name("checks.md")
EXACT = 1e-8
LISTED = re.compile(r"^- `(.+)` (\w+): (.+)$")


class Said(enum.Enum):
    """The answer of a run: one of our warnings or errors, "could not check", or nothing."""

    NAMED = "named"
    UNCHECKED = "could not check"
    NOTHING = "silent"
    DIFFERS = "differs, silent"  # a row listed as right, whose result differs
    CRASH = "crash"  # an error that plain torch does not raise


WRONG_ORDER = (Said.NAMED, Said.UNCHECKED, Said.NOTHING, Said.CRASH)
RIGHT_ORDER = (Said.NOTHING, Said.UNCHECKED, Said.NAMED, Said.DIFFERS, Said.CRASH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    precision: str
    said: Said
    text: str = ""
    error: float | None = None  # of the result, if measured

    @property
    def row(self) -> Row:
        return TABLE[self.name]

    @property
    def rank(self) -> int:
        """Return the severity of the verdict; 0 is correct."""
        return rank(self.row, self.said)

    @property
    def is_mislabelled(self) -> bool:
        """Whether a row is listed as wrong although no result differs."""
        return self.row.is_wrong and self.error is not None and self.error <= EXACT


def rank(row: Row, said: Said) -> int:
    return (WRONG_ORDER if row.is_wrong else RIGHT_ORDER).index(said)


def runs_of(names: Iterable[str]) -> Iterator[Run]:
    for name in names:
        for precision in TABLE[name].dtypes:
            yield judge(name, precision)


def judge(name: str, precision: str, seed: int = 0) -> Run:
    row = TABLE[name]
    with quiet(), kernels_that_are_there() if precision == "autocast" else nullcontext():
        try:
            found, heard = trained(row, seed, precision)
        except Exception as error:
            said = Said.NAMED if is_refusal(error) else Said.CRASH
            said = Said.NOTHING if row.says and row.says in str(error) else said
            return Run(name=name, precision=precision, said=said, text=one_line(error))
        gap = None
        if precision == "float64" and row.is_measured:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gap = max(map(relative_error, found, plainly(row, seed)))
    said, heard = Said.NOTHING, [each for each in heard if not (row.says and row.says in each)]
    if heard:
        is_unchecked = all(UNCHECKED.search(each) for each in heard)
        said = Said.UNCHECKED if is_unchecked else Said.NAMED
    elif not row.is_wrong and gap is not None and gap > EXACT:
        said = Said.DIFFERS
    text = one_line(heard[0]) if heard else ""
    return Run(name=name, precision=precision, said=said, text=text, error=gap)


@functools.cache
def has_lstm_in_bf16() -> bool:
    """Whether oneDNN has an LSTM for this processor, which torch requires under autocast."""
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def kernels_that_are_there() -> Iterator[None]:
    """Use torch's kernels if oneDNN lacks some."""
    if has_lstm_in_bf16():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration", category=UserWarning)
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def trained(row: Row, seed: int, precision: str) -> tuple[list[Any], list[str]]:
    """Return the results of each batch, and our warnings."""
    job = row.make(seed, precision)
    name = "eval_microbatch_size" if job.evaluates else "microbatch_size"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options: dict[str, Any] = {name: job.size, **job.options}
        microbatcher = Microbatcher(job.model, **with_features(options))

        def step(batch: Any) -> Any:
            if job.evaluates:
                result = microbatcher.evaluate(batch, return_outputs=True)
                return {"loss": result.loss, "outputs": result.outputs}
            return {"loss": microbatcher.backward(batch).loss}

        found = list(trail(job, step))
    heard = [str(e.message) for e in caught if issubclass(e.category, AutomicroWarning)]
    return found, heard


def plainly(row: Row, seed: int) -> Iterator[Any]:
    """Return the same results from a loop in plain torch."""
    job = row.make(seed, "float64")

    def step(batch: Any) -> Any:
        if not job.evaluates:
            loss, _ = job.plainly(batch)
            loss.backward()
            return {"loss": loss}
        with torch.no_grad(), evaluating(job.model):
            loss, outputs = job.plainly(batch)
        return {"loss": loss, "outputs": outputs}

    return trail(job, step)


def trail(job: Job, step: Any) -> Iterator[Any]:
    """Yield loss, outputs, gradients and buffers of each batch, with optimizer steps in between."""
    torch.manual_seed(11)
    optimizer = None
    for index in range(job.steps):
        found = dict(step(job.batch(index)))
        found["gradients"] = {n: copied(p.grad) for n, p in job.model.named_parameters()}
        found["buffers"] = {n: copied(b) for n, b in job.model.named_buffers()}
        yield {name: comparable(value) for name, value in found.items()}
        if optimizer is None:
            trained = [each for each in job.model.parameters() if each.requires_grad]
            optimizer = torch.optim.SGD(trained, job.lr)
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    yield
    model.train()


def copied(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def comparable(value: Any) -> Any:
    """Return only numbers: hashes of texts, both parts of complex numbers, 0 for None."""
    if isinstance(value, str):
        return float(int.from_bytes(value.encode()[:6], "big"))
    if isinstance(value, Tensor):
        value = torch.view_as_real(value) if value.is_complex() else value
        return torch.nan_to_num(value.detach().to_dense().double())
    if isinstance(value, dict):
        return {name: comparable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(each) for each in value]
    return value


def one_line(value: Any) -> str:
    kind = f"{type(value).__name__}: " if isinstance(value, Exception) else ""
    return (kind + " ".join(str(value).split()))[:160]


# The table of counts, and the rows that are not correct


def counts(runs: list[Run]) -> str:
    """Count the answers of wrong and right runs by kind."""
    lines = ["| kind | runs | named | could not check | silent | differs or crashes |"]
    lines.append("|---|---|---|---|---|---|")
    grouped: dict[tuple[bool, str], list[Run]] = collections.defaultdict(list)
    for run in runs:
        grouped[not run.row.is_wrong, run.row.kind].append(run)
        grouped[not run.row.is_wrong, "**all**"].append(run)
    for (is_right, kind), those in sorted(grouped.items(), key=lambda item: item[0]):
        said = collections.Counter(run.said for run in those)
        others = said[Said.DIFFERS] + said[Said.CRASH]
        numbers = [len(those), said[Said.NAMED], said[Said.UNCHECKED], said[Said.NOTHING], others]
        label = f"{'right' if is_right else 'wrong'}: {kind}"
        lines.append(f"| {label} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines)


def known() -> dict[tuple[str, str], Said]:
    """Read the incorrect runs from the file."""
    listed = [LISTED.match(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return {
        (match[1], precision): Said(match[2].replace("_", " "))
        for match in listed
        if match
        for precision in match[3].split(", ")
    }


def written(runs: list[Run]) -> str:
    off: dict[tuple[str, Said], list[str]] = collections.defaultdict(list)
    for run in runs:
        if run.rank:
            off[run.name, run.said].append(run.precision)
    lines = [
        f"- `{name}` {said.value.replace(' ', '_')}: {', '.join(precisions)}"
        for (name, said), precisions in off.items()
    ]
    wrong = [line for line in lines if TABLE[line.split("`")[1]].is_wrong]
    right = [line for line in lines if line not in wrong]
    return "\n".join([*HEAD, counts(runs), "", "## Wrong, and not named", "", *wrong, "",
                      "## Right, and not silent", "", *right, ""])  # fmt: skip


HEAD = [
    "# What the checks name today",
    "",
    "Written by `python -m tests.acceptance.checks`. A run is a row in one precision. A test fails",
    "where a run is worse than here, and says where it is better.",
    "",
]


def worse_and_better(runs: list[Run]) -> tuple[list[str], list[str]]:
    before, worse, better = known(), [], []
    for run in runs:
        best = WRONG_ORDER[0] if run.row.is_wrong else RIGHT_ORDER[0]
        then = before.get((run.name, run.precision), best)
        line = f"{run.name}, {run.precision}: {then.value} → {run.said.value} {run.text}"
        if run.rank > rank(run.row, then):
            worse.append(line)
        elif run.rank < rank(run.row, then):
            better.append(line)
    return worse, better


def main() -> None:
    started = time.monotonic()
    runs = []
    for run in runs_of(sys.argv[1:] or TABLE):
        runs.append(run)
        if run.rank or run.is_mislabelled:
            print(
                f"{run.name} | {run.precision} | {run.said.value} | {run.error} | {run.text}",
                flush=True,
            )
    print(counts(runs))
    print(f"{len(runs)} runs in {time.monotonic() - started:.0f} seconds")
    if not sys.argv[1:]:
        FILE.write_text(written(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
