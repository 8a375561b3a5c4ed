"""The sweep over every model: `make torture`, some minutes."""

from collections.abc import Iterator

import pytest

from automicro.torture.torture import Row, render, torture
from tests.torture.more_subjects import SUBJECTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Transformers take five times as long per trial, and have more operations of the same kinds.
MOST_PLANS = {
    "GPT-2": 20,
    "BERT": 20,
    "GRU": 30,
    "nested tail of GPT-2": 20,
    "nested tail of GPT-2, tokens": 20,
}
MOST_PLANS_OF_OTHERS = 50
FEWEST_FAULTS = 10_000


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    found: list[Row] = []
    yield found
    print("\n" + render(found, by_model=True))


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_fault_is_recovered_or_refused_with_nothing_lost(rows: list[Row], name: str) -> None:
    most = MOST_PLANS.get(name, MOST_PLANS_OF_OTHERS)
    report = torture(SUBJECTS[name], name=name, most_plans=most, every_operation=True)
    rows.extend(report.rows)
    assert report.wrong == []
    assert all(row.bytes_alive <= 0 for row in report.rows)


def test_there_were_enough_faults(rows: list[Row]) -> None:
    assert sum(row.faults for row in rows) >= FEWEST_FAULTS
