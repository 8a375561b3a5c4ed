"""Sizes remembered between runs of the Trainer and the Microbatcher."""

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from automicro import Evaluator, Halving, Microbatcher, SizeCacheWarning, Trainer
from automicro.checkpoints.store import CheckpointConfig
from automicro.features import RememberSizes, with_features
from automicro.remembered.cache import RememberedSize, SizeCache
from automicro.step.results import StepResult
from automicro.trainer.report import FitSummary
from tests.callbacks.runs import Sizes, trainer_with
from tests.sweeps import mostly_in_sweeps
from tests.trainer.runs import make_loader, make_model

LIMIT = "320KiB"
ROWS = 512


def make(*callbacks: Any, batches: int = 6, **options: Any) -> Trainer:
    given = {
        "train_dataloader": make_loader(rows=4 * ROWS, batch_size=ROWS),
        "memory_limit": LIMIT,
        "max_duration": f"{batches}ba",
    }
    return trainer_with(*callbacks, **{**given, **options})


def run(batches: int = 6, **options: Any) -> tuple[list[int], list[int], FitSummary]:
    """Return sizes and failures of a run's batches, and its summary."""
    notes = Sizes()
    summary = make(notes, batches=batches, **options).fit()
    return notes.sizes, notes.ooms, summary


def entries(phase: str = "train") -> list[RememberedSize]:
    return [each for each in SizeCache().entries() if each.key["phase"] == phase]


def remember_instead(size: int, cost: float | None = None) -> None:
    (entry,) = entries()
    SizeCache().remember(RememberedSize(key=entry.key, microbatch_size=size, cost_per_row=cost))


def test_second_trainer_run_starts_at_remembered_size() -> None:
    sizes, ooms, _ = run()
    assert sum(ooms) >= 1
    (entry,) = entries()
    assert entry.microbatch_size == sizes[-1]
    assert entry.peak_bytes is not None
    again, no_ooms, summary = run()
    assert again[0] == sizes[-1]
    assert sum(no_ooms) == summary.train_ooms == 0


def test_size_is_written_only_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[RememberedSize] = []
    monkeypatch.setattr(SizeCache, "remember", lambda self, size: written.append(size))
    loader = make_loader(rows=2 * ROWS + 8, batch_size=ROWS)
    sizes, _, _ = run(batches=9, train_dataloader=loader)
    found = [each.microbatch_size for each in written]
    assert found == sorted(set(found))
    assert found[-1] == sizes[-2]
    monkeypatch.undo()
    SizeCache().remember(written[-1])
    (before,) = Path(SizeCache().folder).iterdir()
    seen = before.stat().st_mtime_ns
    run()
    assert before.stat().st_mtime_ns == seen


def test_second_microbatcher_starts_at_remembered_size() -> None:
    batch = torch.randn(ROWS, 12), torch.zeros(ROWS, dtype=torch.int64)

    def steps(**options: Any) -> list[StepResult]:
        model = make_model()
        step = Microbatcher(
            model, loss_fn=nn.CrossEntropyLoss(), memory_limit=LIMIT, **with_features(options)
        )
        return [step.backward(batch) for _ in range(4)]

    first = steps(remember_sizes=True)
    assert first[0].ooms > 0
    assert first[0].recalled_size is None
    second = steps(remember_sizes=True)
    assert [each.ooms for each in second] == [0] * 4
    assert second[0].recalled_size == second[0].microbatch_size == first[-1].microbatch_size
    assert {each.recalled_size for each in second[1:]} == {None}
    assert steps()[0].ooms > 0  # sizes are remembered only on request


@pytest.mark.parametrize("wrong", mostly_in_sweeps([ROWS // 2, 8], quick=[8]))
def test_wrong_remembered_size_is_corrected(wrong: int) -> None:
    sizes, _, _ = run()
    remember_instead(wrong)
    again, ooms, _ = run(batches=12)
    assert (ooms[0] > 0) == (wrong > 8)
    assert again[-1] == sizes[-1]
    (entry,) = entries()
    assert entry.microbatch_size == sizes[-1]


@pytest.mark.sweep
def test_checkpoint_takes_precedence_over_remembered_size(tmp_path: Path) -> None:
    checkpoint = CheckpointConfig(folder=tmp_path / "checkpoints", interval="1ba")
    sizes, _, _ = run(checkpoint=checkpoint)
    remember_instead(2)
    again, ooms, _ = run(batches=9, checkpoint=checkpoint)
    assert again == [sizes[-1]] * 3
    assert ooms == [0, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"microbatch_size": Halving()}, marks=pytest.mark.sweep),
        {"microbatch_size": 64},
        pytest.param({"deterministic": True}, marks=pytest.mark.sweep),
        pytest.param({"features": [RememberSizes(False)]}, marks=pytest.mark.sweep),
    ],
    ids=["a policy", "a fixed size", "deterministic", "not wanted"],
)
def test_unsuitable_runs_neither_read_nor_write_cache(options: dict[str, Any]) -> None:
    def options_again() -> dict[str, Any]:
        is_policy = isinstance(options.get("microbatch_size"), Halving)
        return {"microbatch_size": Halving()} if is_policy else options

    _, ooms, _ = run(**options_again())
    assert entries() == []
    sizes, _, _ = run()
    remember_instead(2)
    again, same, _ = run(**options_again())
    assert same == ooms
    assert again[0] != 2
    (entry,) = entries()
    assert entry.microbatch_size == 2 != sizes[-1]


@pytest.mark.sweep
def test_each_named_evaluation_remembers_its_own_size() -> None:
    loaders = {
        "small": make_loader(rows=ROWS, batch_size=ROWS // 2),
        "large": make_loader(rows=8 * ROWS, batch_size=4 * ROWS),
    }

    def evaluate() -> FitSummary:
        named = {name: Evaluator(dataloader=loader) for name, loader in loaders.items()}
        return run(batches=4, eval_dataloader=named, eval_interval="1ba")[2]

    assert evaluate().eval_ooms > 0
    found = {each.key["rows"]: each.microbatch_size for each in entries("eval")}
    assert found.keys() == {ROWS // 2, 4 * ROWS}
    assert found[4 * ROWS] < 4 * ROWS
    assert evaluate().eval_ooms == 0


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, 16)
        self.hidden = nn.Linear(16, 64)
        self.head = nn.Linear(64, 11)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.relu(self.hidden(self.embedding(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())}


def texts(lengths: list[int]) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.full((16, length), length % 11)} for length in lengths]


@pytest.mark.parametrize("first", mostly_in_sweeps([8, 32], quick=[8]))
def test_second_run_with_varying_lengths_has_no_oom(first: int) -> None:
    def train(lengths: list[int], limit: str = "300KiB") -> list[int]:
        return run(
            batches=len(lengths),
            train_dataloader=texts(lengths),
            model=Tokens(),
            loss_fn=None,
            memory_limit=limit,
        )[1]

    others = [24, 8, 31, 12, 40, 20, 27, 36]
    ooms = train([first, *others])
    assert sum(ooms) > 0 or first == 8
    assert train([40, *others, first]) == [0] * 10
    assert train([first, 40, *others]) == [0] * 10


def test_second_run_does_not_split_batches_that_fit() -> None:
    def train(lengths: list[int]) -> list[int]:
        return run(
            train_dataloader=texts(lengths),
            batches=len(lengths),
            model=Tokens(),
            loss_fn=None,
            memory_limit=None,
        )[0]

    assert train([8, 9, 8, 10]) == [16] * 4
    assert train([32, 8, 40, 48]) == [16] * 4


def broken(*_: Any, **__: Any) -> Any:
    raise PermissionError(13, "not \udc80 yours")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("automicro.remembered.recollection", "describe_run"),
        ("automicro.remembered.recollection.SizeCache", "remember"),
    ],
)
def test_cache_errors_do_not_stop_training(
    owner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit() -> tuple[list[int], list[int]]:
        lengths = [8, 24, 40, 24]
        return run(
            batches=4, train_dataloader=texts(lengths), model=Tokens(), loss_fn=None,
            memory_limit="300KiB",
        )[:2]  # fmt: skip

    expected = fit()
    SizeCache().clear()
    monkeypatch.setattr(f"{owner}.{name}", broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fit() == expected
    told = [each for each in caught if issubclass(each.category, SizeCacheWarning)]
    assert len(told) == 1
    assert "are not remembered in this run (PermissionError" in str(told[0].message)


def test_console_reports_remembered_size_once() -> None:
    def output() -> str:
        trainer = make(progress=True, eval_dataloader=make_loader(rows=32, batch_size=32))
        trainer._session.console = Console(file=io.StringIO(), width=200)
        trainer.fit()
        text = trainer._session.console.file.getvalue()  # type: ignore[attr-defined]
        assert isinstance(text, str)
        return text

    assert "earlier run" not in output()
    (entry,) = entries()
    line = (
        f"train: started from {entry.microbatch_size} rows per microbatch, which an earlier "
        "run found\n"
    )
    second = output()
    assert second.count(line) == second.count("earlier run") == 1
    assert "out of memory" not in second
