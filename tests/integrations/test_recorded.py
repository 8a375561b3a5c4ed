"""Values that microbatches emit, combined into those of the batch."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automicro.errors import MetricWarning
from automicro.integrations.host import RETURNS, Recorded
from automicro.loss.passes import extra_pass


def recording(**kept: Any) -> tuple[Any, Recorded]:
    owner = SimpleNamespace(**kept)
    return owner, Recorded(lambda: {"kept": owner})


def test_checks_do_not_share_recorded_parts() -> None:
    recorded, told = Recorded(), list[float]()

    def step(rows: int, number: float) -> None:
        with recorded.step(rows):
            recorded.note("right", number, tell=lambda value, _: told.append(value))
            recorded.came_to(None)

    passes = [(32, 0.25), (16, 0.2), (16, 0.3), (16, 0.375), (4, 0.25), (12, 5 / 12)]
    with extra_pass():
        for rows, number in passes:
            step(rows, number)
    recorded.begin()
    step(8, 0.25)
    step(8, 0.75)
    recorded.prepare()
    recorded.tell(None)
    assert told == [0.5]


def test_range_that_looked_like_a_maximum_warns() -> None:
    recorded = Recorded()

    def step(*values: float) -> None:
        with recorded.step(len(values)):
            recorded.note("range", max(values) - min(values), tell=lambda value, _: None)
            recorded.came_to(None)

    with extra_pass():
        for rows in ((0.0, 9.0, 4.0, 5.0), (0.0, 4.0, 9.0, 5.0)):  # the ends in one part, in both
            step(*rows)
            step(*rows[:2])
            step(*rows[2:])
    recorded.begin()
    step(0.0, 3.0)
    step(6.0, 7.0)
    with pytest.warns(MetricWarning, match="no check has confirmed"):
        recorded.prepare()


def test_list_with_row_count_tensors_is_joined_per_tensor() -> None:
    """Each list has as many entries as a microbatch has rows, and each tensor has those rows."""
    kept, recorded = recording(both=[])
    outputs = torch.arange(12.0).reshape(6, 2)
    recorded.begin()
    for rows in outputs.split(2):
        with recorded.step(2):
            both = [rows, rows.argmax(1)]
            kept.both.extend(both)
            recorded.came_to(None, {"both": both})
    recorded.prepare()
    for found in (kept.both, recorded.told(RETURNS, None)["both"]):
        assert all(map(torch.equal, found, [outputs, outputs.argmax(1)]))
        assert len(found) == 2


def test_replaced_list_warns() -> None:
    kept, recorded = recording(last=[0.0])
    recorded.begin()
    for number in (1.0, 2.0):
        with recorded.step(2):
            kept.last = [number]
            recorded.came_to(None)
    with pytest.warns(MetricWarning, match=r"kept\.last changed"):
        recorded.prepare()
    assert kept.last == [2.0]


def count(kept: Any, way: str, number: int) -> None:
    match way:
        case "added":
            kept.added += number
        case "added in a dict":
            kept.table["added"] += number
        case "added to a tensor":
            kept.here += number
        case "set":
            kept.found = number
        case "set in a dict":
            kept.table["found"] = number
        case "set in a tensor":
            kept.here.fill_(number)
        case "set anew":
            kept.found = 0
            kept.found += number


@pytest.mark.parametrize("hits", [(2, 3, 1, 4), (0, 5, 2, 3), (3, 5, 4, 4)])
@pytest.mark.parametrize(
    "way",
    ["added", "added in a dict", "added to a tensor", "set", "set in a dict", "set in a tensor",
     "set anew"],
)  # fmt: skip
def test_single_check_distinguishes_set_and_accumulated_counts(
    way: str, hits: tuple[int, ...]
) -> None:
    """A value set from 0 also equals the sum of its parts, like a count."""
    kept, recorded = recording(added=0, here=torch.zeros(()), table={"added": 0.0})

    def step(rows: int, number: int) -> None:
        with recorded.step(rows):
            count(kept, way, number)
            recorded.came_to(None)

    with extra_pass():
        for rows, number in ((16, hits[0] + hits[1]), (5, hits[0]), (11, hits[1])):
            step(rows, number)
    assert vars(kept).keys() == {"added", "here", "table"}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        recorded.begin()
        step(8, hits[2])
        step(8, hits[3])
        recorded.prepare()
    assert [str(each.message).startswith("kept.") for each in said] == [True] * ("set" in way)


def test_filler_step_for_other_ranks_leaves_no_trace() -> None:
    kept, recorded = recording(total=0.0)
    told: list[float] = []
    recorded.begin()
    for is_filler in (False, True):
        recorded.is_filler = is_filler
        with recorded.step(2):
            kept.total += 1.0
            recorded.note("right", kept.total, tell=lambda value, _: told.append(value))
            recorded.came_to(torch.tensor(kept.total))
    recorded.prepare()
    recorded.tell(torch.tensor(1.0))
    assert (recorded.is_split, kept.total, told) == (False, 1.0, [1.0])


def test_change_after_many_batches_warns() -> None:
    kept, recorded = recording(early=0, late=0.0)

    def batch(number: int) -> None:
        recorded.begin()
        for rows in (2, 3):
            with recorded.step(rows):
                kept.early = number + rows
                if number > 5:
                    kept.late = number / rows
                recorded.came_to(None)
        recorded.prepare()
        recorded.tell(None)

    with pytest.warns(MetricWarning, match=r"kept\.early changed"):
        batch(0)
    for number in range(1, 7):
        batch(number)
    with pytest.warns(MetricWarning, match=r"kept\.late changed"):
        batch(7)  # the eighth batch is checked again
