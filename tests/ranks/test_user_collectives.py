"""Collectives of people's own, anywhere, on one rank or all, and running out of memory.

Nothing hangs: what all ranks run ends as it does without a fault, and what one runs is named.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from automicro import Policy
from tests.ranks.user_collectives import OPERATIONS, PLACES, end_of, operations_of_torch
from tests.ranks.world import World, WorldStuckError, world_of
from tests.sweeps import SEED, mostly_in_sweeps

pytestmark = pytest.mark.sweep

CASES_OF_A_WORLD = 60
IN_AN_ATTEMPT = ("forward", "loss", "metric")
Case = tuple[str, str, bool, dict[str, Any]]


def require_ended(world: World, case: Case) -> str:
    """In a word how a case ended: "exact" or "named"."""
    name, place, on_all, options = case
    ranks = list(range(world.size)) if on_all else [1]
    ends = world.run(end_of, name, place, ranks, options)
    if not on_all:
        assert all(end["kind"] in ("DesyncError", "PeerFailedError") for end in ends), ends
        assert any(said_of(name) in end["text"] for end in ends), ends
        return "named"
    kinds = {end["kind"] for end in ends}
    has_nothing_to_send = world.size > 2 and name in ("send", "isend", "send_object_list")
    if has_nothing_to_send:  # the third rank
        assert kinds == {"DesyncError"}, ends
        return "named"
    assert kinds == {""}, ends
    sizes = [end["sizes"] for end in ends]
    assert all(each == sizes[0] for each in sizes)
    if "oom" in options:
        assert min(sizes[0]) < 4, "it ran out of memory"
    for end in ends:
        for one, other in zip(end["state"], ends[0]["state"], strict=True):
            assert torch.equal(one, other)
    return "exact"


def said_of(name: str) -> str:
    """What the operation is called in errors."""
    name = name.split()[0].rpartition(".")[2]
    return {
        "all_gather_object": "all_gather",
        "all_gather_single": "all_gather_into_tensor",
        "batch_isend_irecv": "send",
        "broadcast_object_list": "broadcast",
        "gather_object": "all_gather",
        "isend": "recv",
        "send": "recv",
        "send_object_list": "recv",
        "reduce_scatter_single": "reduce_scatter_tensor",
        "scatter_object_list": "broadcast",
    }.get(name, name.removesuffix("_tensor"))


def every_case(world_size: int, nodes: Sequence[int] = ()) -> Iterator[Case]:
    for name, place, on_all, kind in itertools.product(
        OPERATIONS, PLACES, (True, False), ("ddp", "fsdp")
    ):
        options: dict[str, Any] = {"kind": kind, **({"nodes": nodes} if nodes else {})}
        yield name, place, on_all, options
        for rank in (0, world_size - 1):
            if on_all:
                yield name, place, on_all, {**options, "oom": (rank, 3)}


def test_every_function_of_torch_that_communicates_is_walked() -> None:
    known = {name.split()[0] for name in OPERATIONS}
    received = {name.replace("send", "recv") for name in known}
    assert operations_of_torch() <= known | received


@pytest.mark.parametrize("place", PLACES)
def test_a_few_operations_at_every_place(world2: World, place: str) -> None:
    cases = [case for case in every_case(2) if case[1] == place]
    for case in random.Random(f"{SEED} {place}").sample(cases, 4):
        require_ended(world2, case)


@pytest.mark.parametrize(
    ("kind", "name", "place", "rank"),
    mostly_in_sweeps(
        ["ddp", "fsdp"],
        ["all_reduce", "nn.all_gather", "barrier"],
        ["forward", "loss"],
        [0, 1],
        few=6,
    ),
)
def test_out_of_memory_before_a_collective_changes_nothing(
    world2: World, kind: str, name: str, place: str, rank: int
) -> None:
    options: dict[str, Any] = {"kind": kind, "oom": (rank, 3)}
    found = world2.run(end_of, name, place, [0, 1], options)[0]
    sizes = found["sizes"]
    assert min(sizes) < 4
    options = {"kind": kind, "size": Forced(sizes)}
    expected = world2.run(end_of, name, place, [0, 1], options)[0]
    for one, other in zip(found["state"], expected["state"], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "nodes", [pytest.param((), marks=pytest.mark.slow), (2, 2, 1)], ids=["one node", "two nodes"]
)
def test_a_few_operations_on_three_ranks(world3: World, nodes: Sequence[int]) -> None:
    for case in random.Random(f"{SEED} {nodes}").sample(list(every_case(3, nodes)), 4):
        require_ended(world3, case)


def test_a_collective_at_the_start_of_a_batch_that_one_rank_lacks_is_named(world2: World) -> None:
    for end in world2.run(end_of, "all_reduce", "batch_start", [0, 1], {"rows": 9}):
        assert end["kind"] == "DesyncError"
        assert "all_reduce" in end["text"]


class Forced(Policy):
    """A policy that proposes what another run has used."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return min(self.sizes[0] if self.sizes else num_rows, num_rows)

    def record(self, outcome: Any) -> None:
        assert outcome.fits
        del self.sizes[:1]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("size", "nodes"), [(2, ()), (3, ()), (3, (2, 2, 1))], ids=["two", "three", "two nodes"]
)
def test_every_operation_everywhere(size: int, nodes: Sequence[int], kind: str) -> None:
    counts = {"exact": 0, "named": 0}
    cases = [case for case in every_case(size, nodes) if case[3]["kind"] == kind]
    # Groups that cases make live as long as their processes, each with threads of its own.
    for first in range(0, len(cases), CASES_OF_A_WORLD):
        with world_of(size) as world:
            for case in cases[first : first + CASES_OF_A_WORLD]:
                try:
                    counts[require_ended(world, case)] += 1
                except (AssertionError, WorldStuckError) as error:
                    raise AssertionError(f"{case} on {size} ranks\n{error}") from error
    print(f"{kind} on {size} ranks, nodes {nodes or 'one'}: {counts}, 0 hangs")
