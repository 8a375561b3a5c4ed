"""Samplers yield each row once, equally many batches per rank, and resume on any rank count."""

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from automicro.data import MODES, LengthBatchSampler, with_batch_sampler
from automicro.data.sampler import assign_buckets, derive_buckets, length_cost
from automicro.errors import CheckpointError
from benchmarks import samplers

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "fixed": [{"batch_size": 3}],
    "duration": [{"batch_length": 20.0}],
    "1D-bucketing": [
        {"bucket_edges": [3, 7], "batch_size": [4, 2, 1]},
        {"bucket_edges": [3, 7], "batch_length": 20.0},
    ],
    "1D-bucketing-dyn": [{"batch_cost": 20.0}, {"batch_size": 3, "num_buckets": 3}],
    "2D-bucketing": [{"batch_cost": 60.0, "num_buckets": [3, 2]}],
    "2D-bucketing-fixed": [{"batch_size": 3, "num_buckets": [2, 2]}],
    "2D-bucketing-singlet": [{"batch_cost": 60.0}],
}
CASES = [(mode, options) for mode, each in OPTIONS.items() for options in each]


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a sampler, with rows for at least eight ranks."""
    mode, options = draw(st.sampled_from(CASES))
    lengths = draw(st.lists(st.integers(1, 12), min_size=8, max_size=60))
    seconds = draw(st.lists(st.integers(0, 6), min_size=len(lengths), max_size=len(lengths)))
    return {
        "mode": mode,
        "lengths": lengths,
        "second_lengths": seconds,
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
        **options,
    }


def parts(job: dict[str, Any], world_size: int) -> list[LengthBatchSampler]:
    """Return the sampler of each rank."""
    whole = LengthBatchSampler(**job)
    return [whole.at(rank=rank, world_size=world_size) for rank in range(world_size)]


def rows_of(batches: Any) -> list[int]:
    return sorted(itertools.chain.from_iterable(batches))


@given(jobs(), st.sampled_from([1, 1, 2, 3, 8]), st.integers(0, 2))
@settings(deadline=None, max_examples=200)
def test_rows_come_once_within_budget_and_in_equal_batch_counts_per_rank(
    job: dict[str, Any], world_size: int, epoch: int
) -> None:
    lengths, seconds = np.array(job["lengths"]), np.array(job["second_lengths"])
    by_second = MODES[job["mode"]].dimensions == 2
    sizes, given_by_rank = job.get("batch_size"), []
    for part in parts(job, world_size):
        part.set_epoch(epoch)
        promised, costs = len(part), []
        given_by_rank.append(list(part))
        assert len(given_by_rank[-1]) == promised
        for rows in given_by_rank[-1]:
            most = seconds[rows].max() if by_second else 0
            costs.append(len(rows) * length_cost(lengths[rows].max(), most))
            if world_size > 1:
                continue  # the last batches are balanced over ranks, beyond budgets
            bucket = set(assign_buckets(lengths[rows], job.get("bucket_edges", [])))
            if isinstance(sizes, list):
                assert len(bucket) == 1
                assert len(rows) <= sizes[bucket.pop()]
            elif sizes is not None:
                assert len(rows) <= sizes
            # Only single rows may exceed a budget.
            assert len(rows) == 1 or lengths[rows].sum() <= job.get("batch_length", np.inf)
            assert len(rows) == 1 or costs[-1] <= job.get("batch_cost", np.inf)
        assert part.batch_costs() == costs
    assert set(OPTIONS) == set(MODES)
    assert len(set(map(len, given_by_rank))) == 1
    assert all(batch for batches in given_by_rank for batch in batches)
    everything = rows_of(itertools.chain.from_iterable(given_by_rank))
    assert everything == list(range(len(job["lengths"])))


@given(jobs(), st.data())
@settings(deadline=None, max_examples=200)
def test_epoch_resumes_on_any_number_of_ranks(job: dict[str, Any], data: st.DataObject) -> None:
    before, between, after = (data.draw(st.integers(1, 5)) for _ in range(3))
    given_rows: list[int] = []

    def resume_epoch(world_size: int, state: dict[str, int] | None) -> dict[str, int]:
        samplers = parts(job, world_size)
        for each in samplers:
            each.set_epoch(1)
            if state is not None:
                each.load_state_dict(state)
        rounds = data.draw(st.integers(0, min(map(len, samplers))))
        for each in samplers:
            given_rows.extend(itertools.chain.from_iterable(itertools.islice(each, rounds)))
        states = [each.state_dict(batches_given=rounds) for each in samplers]
        assert all(each == states[0] for each in states)
        return states[0]

    state = resume_epoch(between, resume_epoch(before, None))
    counts = set()
    for part in parts(job, after):
        part.load_state_dict(state)
        promised, rest = len(part), list(part)
        assert promised == len(rest)
        counts.add(len(rest))
        given_rows.extend(itertools.chain.from_iterable(rest))
        part.set_epoch(2)
        assert part.state_dict()["start"] == part.state_dict()["epoch"] - 2 == 0
    assert sorted(given_rows) == list(range(len(job["lengths"])))
    assert max(counts) - min(counts) <= 1


@given(jobs(), st.integers(1, 4), st.data())
@settings(deadline=None, max_examples=100)
def test_epoch_resumes_with_same_batches_on_same_ranks(
    job: dict[str, Any], world_size: int, data: st.DataObject
) -> None:
    for part in parts(job, world_size):
        whole = list(part.at(rank=part.rank, world_size=world_size))
        done = data.draw(st.integers(0, len(whole)))
        iterator = iter(part)
        assert list(itertools.islice(iterator, done)) == whole[:done]
        later = part.at(rank=part.rank, world_size=world_size)
        later.load_state_dict(part.state_dict())
        assert list(later) == whole[done:]
        behind = later.state_dict(batches_given=0)  # as if a loader had prefetched all batches
        assert behind["start"] == part.state_dict()["start"]
        assert later.state_dict()["start"] == len(later.plan())
        assert list(later) == whole  # later epochs are whole


@given(st.lists(st.integers(1, 12), min_size=1, max_size=50), st.integers(5, 30))
@settings(deadline=None, max_examples=100)
def test_batches_are_filled_in_order_while_rows_fit(lengths: list[int], amount: int) -> None:
    options: list[dict[str, Any]] = [
        {"mode": "duration", "batch_length": amount},
        {"mode": "1D-bucketing", "batch_cost": amount, "bucket_edges": [99]},
    ]
    held = [sum, lambda lengths: len(lengths) * max(lengths)]
    for given_options, takes in zip(options, held, strict=True):
        batches: list[list[int]] = [[]]
        for row in range(len(lengths)):
            fits = takes([lengths[each] for each in [*batches[-1], row]]) <= amount
            batches += [] if fits or not batches[-1] else [[]]
            batches[-1].append(row)
        sampler = LengthBatchSampler(lengths=lengths, shuffle=False, **given_options)
        assert list(sampler) == batches


def test_order_depends_only_on_seed_and_epoch() -> None:
    options: dict[str, Any] = {"mode": "fixed", "batch_size": 4}
    sampler = LengthBatchSampler(range(64), seed=3, **options)
    first = list(sampler)
    torch.manual_seed(99)
    np.random.seed(99)
    assert list(LengthBatchSampler(range(64), seed=3, **options)) == first
    assert list(LengthBatchSampler(range(64), seed=4, **options)) != first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_ranks_share_one_bucket_except_for_remainders() -> None:
    lengths = np.random.default_rng(1).lognormal(2, 0.7, 8000)
    whole = LengthBatchSampler(
        mode="1D-bucketing-dyn", lengths=lengths, batch_length=200.0, num_buckets=8
    )
    buckets = derive_buckets([lengths], (8,))
    rounds = [*zip(*(whole.at(rank=rank, world_size=4) for rank in range(4)), strict=True)]
    mixed = [len(set(buckets[np.concatenate(each)])) > 1 for each in rounds]
    assert len(rounds) > 40
    assert not any(mixed[:-8])


def test_derived_buckets_have_similar_totals() -> None:
    lengths = np.random.default_rng(0).lognormal(2, 0.8, 20_000)
    totals = np.bincount(derive_buckets([lengths], (10,)), weights=lengths)
    assert len(totals) == 10
    assert totals.max() < 1.05 * totals.min()


def test_with_batch_sampler_keeps_other_loader_options() -> None:
    rows = TensorDataset(torch.arange(6))
    loader = DataLoader(rows, batch_size=4, collate_fn=lambda each: len(each), drop_last=True)
    sampler = LengthBatchSampler(rows, mode="fixed", batch_size=5, shuffle=False)
    other = with_batch_sampler(loader, sampler)
    assert list(other) == [5, 1]
    assert (other.batch_size, other.drop_last) == (None, False)
    assert list(loader) == [4]
    with pytest.raises(TypeError, match=r"\[1, 2\] cannot be sampled by length"):
        with_batch_sampler([1, 2], sampler)
    with pytest.raises(TypeError, match="batch_size=None"):
        with_batch_sampler(DataLoader(rows, batch_size=None), sampler)


def test_average_batch_reports_known_units() -> None:
    sampler = LengthBatchSampler(
        mode="fixed",
        lengths=[2.0, 4.0, 6.0],
        second_lengths=[5, 5, 20],
        unit="seconds",
        second_unit="tokens",
        batch_size=2,
    )
    average = sampler.average_batch()
    assert (average.rows, average.seconds, average.tokens) == (1.5, 6.0, 15.0)


def test_state_of_other_lengths_or_options_is_refused() -> None:
    saved = LengthBatchSampler(range(9), mode="fixed", batch_size=2).state_dict()
    for other in (
        LengthBatchSampler(range(9), mode="fixed", batch_size=3),
        LengthBatchSampler(range(8), mode="fixed", batch_size=2),
        LengthBatchSampler(mode="duration", lengths=[1] * 9, batch_length=2),
    ):
        with pytest.raises(CheckpointError, match="with other lengths or options"):
            other.load_state_dict(saved)


ONE = {"lengths": [1]}
DURATION: dict[str, Any] = {"mode": "duration", **ONE}
EDGES: dict[str, Any] = {"mode": "1D-bucketing", **ONE}
PAIR: dict[str, Any] = {"mode": "2D-bucketing-fixed", "lengths": [1], "second_lengths": [1, 2]}
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"mode": "2d"}, "mode='2d' is not known; use one of fixed, duration, 1D-bucketing"),
    ({}, "mode='fixed' needs batch_size, accepts nothing else"),
    ({"batch_size": 2, "batch_cost": 1}, "but got batch_size, batch_cost: give"),
    ({"mode": "duration", "batch_length": 5}, "needs lengths, batch_length"),
    ({**EDGES, "mode": "2D-bucketing", "batch_cost": 5}, "needs lengths, second_lengths, batch_c"),
    ({**EDGES, "batch_size": 5}, "needs lengths, bucket_edges, batch_size or"),
    ({**EDGES, "batch_size": 5, "bucket_edges": [3, 2]}, "do not ascend"),
    ({**EDGES, "batch_size": [5], "bucket_edges": [3]}, "and one for longer rows (2 here)"),
    ({"batch_size": [1, 2]}, "give one, or in mode='1D-bucketing' one"),
    ({"batch_size": 0}, "batch_size=0 must be at least 1"),
    ({"batch_size": 2, "bucket_edges": [1]}, "but got batch_size, bucket_edges"),
    (
        {**EDGES, "mode": "1D-bucketing-dyn", "batch_size": 2, "num_buckets": [1, 2]},
        "give a number, such as 10",
    ),
    ({**PAIR, "batch_size": 2}, "lengths has 1 numbers and second_lengths 2"),
    ({**DURATION, "batch_length": -1}, "batch_length=-1 must be above 0"),
    ({"batch_size": 2, "rank": 1}, "give both, or neither"),
    ({"batch_size": 2, "rank": 2, "world_size": 2}, "=2 of 2 ranks"),
    ({"batch_size": 2, "unit": "seconds"}, "unit='seconds' needs lengths"),
    ({**DURATION, "batch_length": 1, "unit": "h"}, "='h' is not known; use one of sec"),
    ({"batch_size": 2, "cost": len}, "cost with batch_cost"),
    ({"batch_size": 1, "rank": 0, "world_size": 5}, "4 rows cannot be divided among 5 ranks"),
]


def test_invalid_options_are_refused_with_remedy() -> None:
    for options, words in INVALID:
        dataset = None if "lengths" in options else range(4)
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            len(LengthBatchSampler(dataset, **{"mode": "fixed", **options}))
        assert re.search("give|leave|pass|use", str(caught.value))


@pytest.mark.parametrize("job", [samplers.language(4000), samplers.speech(4000)])
def test_buckets_reduce_padding_and_budgets_limit_cost(
    job: samplers.Job,
) -> None:
    rows = {mode: samplers.measure(mode, job) for mode in MODES}
    alone = rows["fixed"].padding
    for mode, row in rows.items():
        assert 26 < row.rows < 38, mode
        assert (row.padding < alone * 0.45) == ("bucketing" in mode and "singlet" not in mode), mode
    for mode in ("2D-bucketing", "2D-bucketing-singlet"):
        assert rows[mode].largest_cost < 1.3 < rows["2D-bucketing-fixed"].largest_cost
    assert mode in samplers.describe_padding(job)


def test_large_plans_contain_every_row() -> None:
    job = samplers.speech(300_000)
    for mode in MODES:
        plan = samplers.make_sampler(mode, job).plan()
        assert np.array_equal(np.sort(plan.rows), np.arange(300_000))
        assert np.array_equal(np.sort(plan.order), np.arange(len(plan)))
        assert (np.diff(plan.starts) > 0).all()
