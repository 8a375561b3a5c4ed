"""Checkpoints of several ranks: each writes its part, and another number of ranks goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from automicro.checkpoints.reading import load_checkpoint
from automicro.errors import CheckpointError
from automicro.trainer.data.feed import Feed
from tests.ranks.checkpoint_runs import Training, error_of, go_on, newest
from tests.ranks.world import World

pytestmark = pytest.mark.sweep

KINDS = ["ddp", "fsdp"]


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-9, msg=name)


def alone(folder: Path, until: int, **options: Any) -> dict[str, Any]:
    state = torch.get_rng_state()
    try:
        return go_on("plain", folder, until, **options)
    finally:
        torch.set_rng_state(state)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_world_goes_on_to_the_bit(world2: World, tmp_path: Path, kind: str) -> None:
    options = {"noisy": True, "averages": kind == "ddp"}
    expected = world2.run(go_on, kind, tmp_path / "whole", 7, **options)
    world2.run(go_on, kind, tmp_path / "cut", 4, **options)
    resumed = world2.run(go_on, kind, tmp_path / "cut", 7, **options)
    for here, there in zip(resumed, expected, strict=True):
        assert here["resumed_at"] == 4
        assert here["warnings"] == []
        assert_same(here["end"], there["end"])
        assert_same(here["own"], there["own"])
    # Each rank has random numbers and statistics of its own.
    mine, others = (each["own"] for each in resumed)
    assert not torch.equal(mine["rng"], others["rng"])
    assert not torch.equal(mine["norm.running_mean"], others["norm.running_mean"])


def test_ranks_share_out_what_is_written(world2: World, tmp_path: Path) -> None:
    written = {}
    for kind in KINDS:
        world2.run(go_on, kind, tmp_path / kind, 1)
        [path] = (tmp_path / kind).iterdir()
        tables = {"manifest.json", "tensors.json", ".metadata", "state.pt", "state-of-rank-1.pt"}
        data = {"__0_0.distcp", "__1_0.distcp"}
        assert {each.name for each in path.iterdir()} == tables | data
        index = json.loads((path / "tensors.json").read_bytes())
        written[kind] = {
            name: [chunk["file"] for chunk in entry["chunks"]] for name, entry in index.items()
        }
    first, second = "__0_0.distcp", "__1_0.distcp"
    assert written["ddp"]["modules.0.first.weight"] == [first]
    assert written["ddp"]["optimizer.state.first.weight.exp_avg"] == [first]
    assert written["fsdp"]["modules.0.first.weight"] == [first, second]
    assert written["fsdp"]["optimizer.state.first.weight.exp_avg"] == [first, second]
    for kind in KINDS:
        of_second = [name for name, files in written[kind].items() if files == [second]]
        assert "rank-1.rng.torch" in of_second
        assert all(name.startswith("rank-1.") for name in of_second)


def check_chain(worlds: list[tuple[str, World | None]], folder: Path, **options: Any) -> None:
    """Each world trains for an epoch, from where the one before ended."""
    expected = alone(folder / "whole", 3 * len(worlds), averages=True)
    before: dict[str, Tensor] | None = None
    for index, (kind, world) in enumerate(worlds):
        until = 3 * (index + 1)
        chosen = {**options, "averages": True}
        if world is None:
            results = [alone(folder / "chain", until, **chosen)]
        else:
            results = world.run(go_on, kind, folder / "chain", until, **chosen)
        for each in results:
            assert each["resumed_at"] == 3 * index
            assert each["warnings"] == []
            if before is not None:
                loaded = each["after_resume"]
                assert [n for n in loaded if not torch.equal(loaded[n], before[n])] == []
                line = f"and resumed by {len(results)} rank"
                assert any(line in text for text in each["lines"])
            assert_same(each["end"], results[0]["end"])
        before = results[0]["end"]
    assert before is not None
    assert_close(before, expected["end"])


def test_more_and_fewer_ranks_and_none_go_on_in_any_wrapper(
    world2: World, world3: World, tmp_path: Path
) -> None:
    check_chain(
        [("fsdp", world3), ("ddp", world2), ("plain", None), ("fsdp", world2), ("ddp", world3)],
        tmp_path,
    )


@pytest.mark.slow
def test_from_four_ranks_to_one_and_to_three(
    world2: World, world3: World, world4: World, tmp_path: Path
) -> None:
    check_chain(
        [
            ("hsdp", world4),
            ("fsdp", world2),
            ("plain", None),
            ("fsdp", world3),
            ("fsdp", world4),
            ("ddp", world2),
            ("hsdp", world4),
        ],
        tmp_path,
    )


def test_another_number_of_ranks_draws_other_random_numbers_on_each(
    world2: World, world3: World, tmp_path: Path
) -> None:
    world2.run(go_on, "ddp", tmp_path, 3)
    states = [each["own"]["rng"] for each in world3.run(go_on, "ddp", tmp_path, 3)]
    again = [each["own"]["rng"] for each in world3.run(go_on, "ddp", tmp_path, 3)]
    assert len({bytes(state.tolist()) for state in states}) == 3
    # One of this world was saved meanwhile, which goes on with them.
    assert all(map(torch.equal, states, again))


def test_within_an_epoch_another_number_of_ranks_is_refused(world2: World, tmp_path: Path) -> None:
    world2.run(go_on, "fsdp", tmp_path, 4)
    with pytest.raises(
        CheckpointError,
        match=r"2 ranks saved it after 1 batches of an epoch.* on 1 rank: train_dataloader",
    ):
        alone(tmp_path, 6)
    alone(tmp_path / "one", 4)
    for error in world2.run(error_of, "ddp", tmp_path / "one", 6):
        assert "1 rank saved it after 1 batches" in error


def test_damage_in_any_file_makes_all_ranks_take_the_one_before(
    world2: World, tmp_path: Path
) -> None:
    for kind in KINDS:
        folder = tmp_path / kind
        world2.run(go_on, kind, folder, 3)
        newest_path = max(folder.iterdir())
        for file in sorted(newest_path.iterdir()):
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            whole = file.read_bytes()
            file.write_bytes(content)
            found = world2.run(newest, folder)
            file.write_bytes(whole)
            assert [step for step, _ in found] == [2, 2], file.name
            assert file.name in found[0][1][0]
            assert found[1][1] == []
        assert [step for step, _ in world2.run(newest, folder)] == [3, 3]


def test_without_any_good_checkpoint_all_ranks_say_so(world2: World, tmp_path: Path) -> None:
    world2.run(go_on, "ddp", tmp_path, 1)
    (next(tmp_path.iterdir()) / "state-of-rank-1.pt").unlink()
    for error in world2.run(error_of, "ddp", tmp_path, 2):
        assert "all 1 checkpoints" in error
        assert "state-of-rank-1.pt" in error


def test_one_process_reads_all_ranks_weights(world2: World, tmp_path: Path) -> None:
    end = world2.run(go_on, "fsdp", tmp_path, 2)[0]["end"]
    weights = load_checkpoint(tmp_path).state["modules"][0]
    assert_same(dict(weights), {name: end[name] for name in weights})


def test_every_row_comes_once_where_the_data_know_how_to_go_on(
    world2: World, tmp_path: Path
) -> None:
    world2.run(go_on, "ddp", tmp_path, 4)
    training = Training("plain", tmp_path, feed=ReshardableFeed)
    state = torch.get_rng_state()
    training.resume()
    training.train(6)
    torch.set_rng_state(state)
    assert_close(training.everything(), alone(tmp_path / "whole", 6)["end"])


class ReshardableFeed(Feed):
    """Of batches of the whole world, each of which every rank has taken its rows from."""

    def reshard(self, states: Any, *, rank: int) -> dict[str, Any]:
        assert len({each["passes"][-1]["given"] for each in states}) == 1
        return dict(states[0])
