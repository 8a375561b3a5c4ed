"""The sweep over all models: `make torture`, about half an hour."""

import resource
from collections.abc import Iterator

import pytest

from tests.torture.engine.sweep import Row, render, torture
from tests.torture.huge_pages import use_huge_pages
from tests.torture.more_subjects import SUBJECTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# All four faults at each operation of a settled call, for one small model per mechanism. For other
# subjects, one of the four is drawn.
ALL_FOUR = {
    *("MLP", "BatchNorm and dropout", "tied weights", "state of every kind", "nested tail"),
}
# Models with four hundred or more operations, whose mechanisms smaller models cover: one fault at
# every tenth operation. Levels treat the transformer's block like those of "recompute buffers" and
# "nested tail, recompute + offload"; the tail of GPT-2 covers GPT-2 itself and the other
# tails.
LARGE = {
    *("BERT", "nested tail of GPT-2", "nested tail of GPT-2, tokens", "recompute", "offload"),
    *("recompute BatchNorm", "recompute + offload", "every level"),
    *("nested dropout inside recompute", "exact BatchNorm of a part, recompute + offload"),
}
MOST_PLANS, MOST_PLANS_OF_LARGE = 4, 2  # of each other row of the table
FEWEST_FAULTS = 10_000


def title(name: str) -> str:
    """Return the name of a subject in the table, with a mark if its sweep is partial."""
    if name in LARGE:
        return f"{name} (every tenth)"
    return name if name in ALL_FOUR else f"{name} (one of four)"


def tortured(name: str) -> list[Row]:
    """Return the results of a subject's sweep."""
    return torture(
        SUBJECTS[name],
        name=title(name),
        most_plans=MOST_PLANS_OF_LARGE if name in LARGE else MOST_PLANS,
        faults_per_operation=4 if name in ALL_FOUR else 0.1 if name in LARGE else 1,
    )


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    found: list[Row] = []
    use_huge_pages()
    yield found
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    minutes = sum(each.ru_utime + each.ru_stime for each in used) / 60
    print(f"\n{render(found, by_model=True)}\n{minutes:.0f} minutes of a processor")


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_fault_is_recovered_or_raised_without_loss(rows: list[Row], name: str) -> None:
    found = tortured(name)
    rows.extend(found)
    assert [each for row in found for each in row.wrong] == []
    assert all(row.bytes_alive <= 0 for row in found)
    settled = [row for row in found if "first" not in row.what]
    assert not any(row.extra for row in settled)  # otherwise, the calls would not be settled


def test_sweep_has_enough_faults(rows: list[Row]) -> None:
    assert sum(row.faults for row in rows) >= FEWEST_FAULTS
