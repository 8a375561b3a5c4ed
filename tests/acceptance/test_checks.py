"""The table of checks: no warning may be lost, and no false alarm may be added."""

import warnings
from collections.abc import Iterable

import pytest

from tests.acceptance.checks import (
    TABLE,
    Run,
    Said,
    counts,
    judge,
    known,
    runs_of,
    worse_and_better,
)
from tests.sweeps import SEED

SAMPLE = [*TABLE][SEED % 32 :: 32]


def check(names: Iterable[str], capsys: pytest.CaptureFixture[str]) -> None:
    runs: list[Run] = list(runs_of(names))
    worse, better = worse_and_better(runs)
    with capsys.disabled():
        print(f"\n{len(runs)} runs of {len({run.name for run in runs})} rows\n{counts(runs)}")
        print(
            "\n".join(
                ["better than checks.md, which is to be written anew:", *better] * bool(better)
            )
        )
    assert worse == []
    assert [f"{run.name}: {run.error}" for run in runs if run.is_mislabelled] == []


@pytest.mark.sweep
def test_sampled_verdicts_are_no_worse_than_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    check(SAMPLE, capsys)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_verdicts_are_no_worse_than_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    check(TABLE, capsys)


def test_table_is_large_and_covers_recorded_rows() -> None:
    runs = dict.fromkeys((True, False), 0)
    for row in TABLE.values():
        runs[row.is_wrong] += len(row.dtypes)
    assert min(runs.values()) >= 577
    assert {name for name, _ in known()} <= TABLE.keys()


@pytest.mark.sweep
def test_missing_warnings_and_false_alarms_count_as_worse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = judge("a mean, of numbers", "float64")
    assert right.said is Said.NOTHING
    wrong = judge("a sum, of numbers", "float64")
    assert wrong.said is Said.NAMED
    assert worse_and_better([right, wrong]) == ([], [])
    monkeypatch.setattr(warnings, "warn_explicit", lambda *args, **options: None)
    deaf = judge("a sum, of numbers", "float64")
    assert deaf.said is Said.NOTHING
    alarm = Run(name=right.name, precision=right.precision, said=Said.NAMED)
    assert len(worse_and_better([deaf, alarm])[0]) == 2
