"""Random steps in other trainers; ``told.main`` runs five hundred of them."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automicro.errors import MetricWarning
from automicro.integrations.host import RETURNS, Recorded
from automicro.loss.passes import extra_pass
from tests.integrations.told import Program, host_of, judge, quietly

pytest.importorskip("transformers")
pytest.importorskip("lightning")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_reported_values_match_host_or_warn(name: str, seed: int) -> None:
    host = host_of(name)
    with quietly():
        verdict = judge(host, Program.drawn(host, seed))
    assert verdict.kind != "silent", verdict.about


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cut", ["size", "oom"])
@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_each_way_of_reporting_matches_host_or_warns(name: str, cut: str) -> None:
    host = host_of(name)
    for program in Program.of_every_way(host, cut):
        with quietly():
            verdict = judge(host, program)
        assert verdict.kind != "silent", verdict.about


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


def test_list_with_row_count_tensors_is_joined_per_tensor() -> None:
    """Each list has as many entries as a microbatch has rows, and each tensor has those rows."""
    kept = SimpleNamespace(both=[])
    recorded = Recorded(lambda: {"kept": kept})
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
    kept = SimpleNamespace(last=[0.0])
    recorded = Recorded(lambda: {"kept": kept})
    recorded.begin()
    for number in (1.0, 2.0):
        with recorded.step(2):
            kept.last = [number]
            recorded.came_to(None)
    with pytest.warns(MetricWarning, match=r"kept\.last changed"):
        recorded.prepare()
    assert kept.last == [2.0]


class Counter:
    """Values that a step counts next to its model, starting unset or from 0."""

    def __init__(self) -> None:
        self.added, self.here, self.table = 0, torch.zeros(()), {"added": 0.0}


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
    kept = Counter()
    recorded = Recorded(lambda: {"kept": kept})

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
    kept, told = SimpleNamespace(total=0.0), list[float]()
    recorded = Recorded(lambda: {"kept": kept})
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
    kept = SimpleNamespace(early=0, late=0.0)
    recorded = Recorded(lambda: {"kept": kept})

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
