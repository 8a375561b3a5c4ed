"""What ranks were given differently is said on all of them, before any waits for another."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, TensorDataset

from automicro import Trainer
from automicro.trainer.same_on_all_ranks import MAY_DIFFER, outline_options
from automicro.values import as_text
from tests.ranks import differences as jobs
from tests.ranks.world import World

SAID = {
    "accumulate_batches": "accumulate_batches: 2 on rank 0; 1 on rank 1",
    "average": "gradients or weights: ExponentialMovingAverage on rank 0; none on rank 1",
    "callbacks": "callbacks that change batches, gradients or weights: Halver on rank 0; none on",
    "checkpoint": "; None on rank 1",
    "eval_dataloader": "batch_size=3, drop_last=False on rank 0; None on rank 1",
    "eval_interval": "eval_interval: '1ep' on rank 0; '2ep' on rank 1",
    "grad_clip_norm": "grad_clip_norm: 1.0 on rank 0; None on rank 1",
    "learning rate": "lr: 0.1 on rank 0; 0.2 on rank 1",
    "max_duration": "max_duration: '2ep' on rank 0; '3ep' on rank 1",
    "metrics": "metrics: {'accuracy': MulticlassAccuracy} on rank 0; None on rank 1",
    "microbatch_size": "microbatch_size: 4 on rank 0; 'auto' on rank 1",
    "named": "eval_dataloader: named 'new' on rank 0; None on rank 1",
    "optimizer": "optimizer: SGD on rank 0; AdamW on rank 1",
    "precision": "precision: 'bf16' on rank 0; 'fp32' on rank 1",
    "train_dataloader": "dataset=TensorDataset, rows=24",
}


@pytest.mark.parametrize("case", SAID)
def test_what_differs_is_named_with_the_value_of_each_rank(
    world2: World, case: str, tmp_path: Path
) -> None:
    (kind, text), other = world2.run(jobs.refuse, case, str(tmp_path))
    assert other == (kind, text)
    assert kind == "DesyncError"
    assert SAID[case] in text
    assert "Give every rank the same" in text
    names = 2 if case == "named" else 1
    assert text.count("\n") == 1 + names, "a line for what differs, and no other"


@pytest.mark.parametrize("case", ["metrics", "max_duration"])
def test_so_it_is_where_the_model_is_to_be_sharded(
    world2: World, case: str, tmp_path: Path
) -> None:
    for kind, text in world2.run(jobs.refuse, case, str(tmp_path), parallel="fsdp"):
        assert kind == "DesyncError"
        assert SAID[case] in text


def test_models_of_different_shapes_are_named_by_their_parameters(world2: World) -> None:
    for kind, text in world2.run(jobs.refuse_other_model):
        assert kind == "DesyncError"
        assert (
            "parameter '0.weight' of model: float32 of shape [8, 6] on rank 0; "
            "float32 of shape [9, 6] on rank 1"
        ) in text


def test_evaluating_on_other_data_is_refused_and_all_can_go_on(world2: World) -> None:
    for kind, text in world2.run(jobs.refuse_other_evaluation):
        assert kind == "DesyncError"
        assert "rows=8" in text
        assert "rows=9" in text


def test_what_may_differ_does(world2: World, tmp_path: Path) -> None:
    assert world2.run(jobs.train_with_own_listeners, str(tmp_path)) == [6, 6]


def test_every_argument_of_the_trainer_is_compared_or_may_differ() -> None:
    arguments = {
        name: None if each.default is inspect.Parameter.empty else each.default
        for name, each in inspect.signature(Trainer.__init__).parameters.items()
        if name not in ("self", "model")
    }
    outline = outline_options(arguments)
    assert set(arguments) >= MAY_DIFFER
    for name in set(arguments) - MAY_DIFFER - {"modules"}:  # no modules, no line
        assert any(each.startswith(name) for each in outline), name


def test_values_have_a_text_without_what_differs_from_process_to_process() -> None:
    class Sampler:
        pass

    values: list[Any] = [Sampler(), lambda: 0, DataLoader(TensorDataset()), {"by": Sampler()}]
    for value in values:
        assert "0x" not in as_text(value)


@pytest.mark.parametrize("argument", ["train_dataloader", "eval_dataloader"])
def test_a_sampler_that_draws_from_what_nobody_seeds_is_refused(
    world2: World, argument: str
) -> None:
    for kind, text, batches in world2.run(jobs.refuse_other_order, argument):
        assert kind == "DesyncError"
        assert f"the rows of {argument} come in another order" in text
        assert "(order 1 on rank 0; order 2 on rank 1)" in text
        assert "give its generator a fixed seed" in text
        assert (batches == 0) is (argument == "train_dataloader")


@pytest.mark.parametrize(("kind", "rows"), [("rows", 1), ("batches", 8)])
def test_fewer_rows_or_batches_than_ranks_are_evaluated(
    world2: World, kind: str, rows: int
) -> None:
    first, second = world2.run(jobs.evaluate_little, kind, rows)
    assert first == second
    assert set(first) == {"loss", "accuracy"}


@pytest.mark.parametrize("argument", ["train_dataloader", "eval_dataloader"])
def test_data_that_give_no_rank_a_batch_are_an_error(world2: World, argument: str) -> None:
    for kind, text in world2.run(jobs.refuse_no_batch, argument):
        assert kind == "DataLoaderError"
        assert f"{argument} (DataLoader) gave no batch" in text


@pytest.mark.parametrize("rows", [10, 11, 13])
def test_no_rank_gets_a_single_row_for_batchnorm(world2: World, rows: int) -> None:
    # The last batch has 2, 3 or 5 rows for two ranks.
    assert world2.run(jobs.train_batchnorm, rows, batchnorm="ignore") == [(2, rows)] * 2


def test_a_single_row_of_a_rank_is_explained_with_its_remedy(world2: World) -> None:
    (kind, _), (own_kind, own) = world2.run(jobs.train_on_one_row)
    assert (kind, own_kind) == ("PeerFailedError", "ValueError")
    assert "of 5 rows of all ranks this one has no more; use drop_last=True" in own


@pytest.mark.parametrize("event", ["batch_end", "gradients_ready", "epoch_end"])
def test_a_rank_that_stops_between_batches_does_not_claim_to_be_as_before(
    world2: World, event: str
) -> None:
    (kind, text), (own_kind, _) = world2.run(jobs.fail_at, event)
    assert (kind, own_kind) == ("PeerFailedError", "KeyError")
    assert "nothing was rolled back: ranks may be one step apart" in text
    assert "as before" not in text


def test_a_rank_that_stops_inside_of_a_batch_says_that_it_was_rolled_back(world2: World) -> None:
    (kind, text), _ = world2.run(jobs.fail_at, "forward_start")
    assert kind == "PeerFailedError"
    assert "rolled back here: the state is as before it" in text
