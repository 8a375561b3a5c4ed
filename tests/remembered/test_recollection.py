"""Sizes remembered between runs of the Trainer and the Microbatcher."""

import io
import warnings
from collections.abc import Callable
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


def test_second_trainer_run_starts_at_remembered_size_and_says_so_once() -> None:
    def fit() -> tuple[list[int], list[int], str]:
        notes = Sizes()
        evaluation = make_loader(rows=32, batch_size=32)
        trainer = make(notes, progress=True, eval_dataloader=evaluation)
        trainer._session.console = Console(file=(file := io.StringIO()), width=200)
        trainer.fit()
        return notes.sizes, notes.ooms, file.getvalue()

    sizes, ooms, output = fit()
    assert sum(ooms) >= 1
    assert "earlier run" not in output
    (entry,) = entries()
    assert entry.microbatch_size == sizes[-1]
    assert entry.peak_bytes is not None
    again, no_ooms, output = fit()
    assert again[0] == sizes[-1]
    assert sum(no_ooms) == 0
    line = f"started from {sizes[-1]} rows per microbatch, which an earlier run found\n"
    assert output.count(f"train: {line}") == output.count("earlier run") == 1


def test_size_is_written_only_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[RememberedSize] = []
    loader = make_loader(rows=2 * ROWS + 8, batch_size=ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(SizeCache, "remember", lambda self, size: written.append(size))
        sizes, _, _ = run(batches=9, train_dataloader=loader)
    found = [each.microbatch_size for each in written]
    assert found == sorted(set(found))
    assert found[-1] == sizes[-2]
    SizeCache().remember(written[-1])
    (before,) = Path(SizeCache().folder).iterdir()
    seen = before.stat().st_mtime_ns
    run()
    assert before.stat().st_mtime_ns == seen


def test_second_microbatcher_starts_at_remembered_size() -> None:
    batch = torch.randn(ROWS, 12), torch.zeros(ROWS, dtype=torch.int64)

    def steps(**options: Any) -> list[StepResult]:
        step = Microbatcher(
            make_model(), loss_fn=nn.CrossEntropyLoss(), memory_limit=LIMIT,
            **with_features(options),
        )  # fmt: skip
        return [step.backward(batch) for _ in range(4)]

    first = steps(remember_sizes=True)
    assert first[0].ooms > 0
    assert first[0].recalled_size is None
    second = steps(remember_sizes=True)
    assert [each.ooms for each in second] == [0] * 4
    assert second[0].recalled_size == second[0].microbatch_size == first[-1].microbatch_size
    assert {each.recalled_size for each in second[1:]} == {None}
    assert steps()[0].ooms > 0  # sizes are remembered only on request


@pytest.mark.parametrize("wrong", [8, pytest.param(ROWS // 2, marks=pytest.mark.sweep)])
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
    assert (again, ooms) == ([sizes[-1]] * 3, [0] * 3)


SWEEP = pytest.mark.sweep


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(lambda: {"microbatch_size": Halving()}, marks=SWEEP, id="a policy"),
        pytest.param(lambda: {"microbatch_size": 64}, id="a fixed size"),
        pytest.param(lambda: {"deterministic": True}, marks=SWEEP, id="deterministic"),
        pytest.param(lambda: {"features": [RememberSizes(False)]}, marks=SWEEP, id="unwanted"),
    ],
)
def test_unsuitable_runs_neither_read_nor_write_cache(
    options: Callable[[], dict[str, Any]],
) -> None:
    _, ooms, _ = run(**options())
    assert entries() == []
    sizes, _, _ = run()
    remember_instead(2)
    again, same, _ = run(**options())
    assert same == ooms
    assert again[0] != 2
    (entry,) = entries()
    assert entry.microbatch_size == 2 != sizes[-1]


@pytest.mark.sweep
def test_each_named_evaluation_remembers_its_own_size() -> None:
    def evaluate() -> FitSummary:
        sizes = {"small": ROWS // 2, "large": 4 * ROWS}
        named = {
            name: Evaluator(dataloader=make_loader(rows=2 * size, batch_size=size))
            for name, size in sizes.items()
        }
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
        self.net = nn.Sequential(
            nn.Embedding(11, 16), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 11)
        )

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        logits = self.net(input_ids).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(logits, input_ids.flatten())}


def train_texts(lengths: list[int], limit: str | None = "300KiB") -> tuple[list[int], list[int]]:
    """Return sizes and failures of batches of texts."""
    texts = [{"input_ids": torch.full((16, length), length % 11)} for length in lengths]
    options: dict[str, Any] = {"model": Tokens(), "loss_fn": None, "memory_limit": limit}
    return run(batches=len(lengths), train_dataloader=texts, **options)[:2]


@pytest.mark.parametrize("first", [8, pytest.param(32, marks=pytest.mark.sweep)])
def test_second_run_with_varying_lengths_has_no_oom(first: int) -> None:
    others = [24, 8, 31, 12, 40, 20, 27, 36]
    _, ooms = train_texts([first, *others])
    assert sum(ooms) > 0 or first == 8
    assert train_texts([40, *others, first])[1] == [0] * 10
    assert train_texts([first, 40, *others])[1] == [0] * 10


def test_second_run_does_not_split_batches_that_fit() -> None:
    assert train_texts([8, 9, 8, 10], limit=None)[0] == [16] * 4
    assert train_texts([32, 8, 40, 48], limit=None)[0] == [16] * 4


@pytest.mark.parametrize("name", ["describe_run", "SizeCache.remember"])
def test_cache_errors_do_not_stop_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "not \udc80 yours")

    lengths = [8, 24, 40, 24]
    expected = train_texts(lengths)
    SizeCache().clear()
    monkeypatch.setattr(f"automicro.remembered.recollection.{name}", broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train_texts(lengths) == expected
    (told,) = [each for each in caught if issubclass(each.category, SizeCacheWarning)]
    assert "are not remembered in this run (PermissionError" in str(told.message)
