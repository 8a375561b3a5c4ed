"""TRL's trainers with one line: pairs in two blocks, rows without padding, numbers in lists."""

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import datasets
from transformers import TrainerCallback
from transformers.utils import logging

from automicro import MemoryBudget, SampleTooLargeError
from automicro.integrations.transformers import Pairs, enable
from tests.integrations.launching import torchrun
from tests.integrations.transformers_runs import Scales, furthest, logged, losses, parameters, run
from tests.integrations.trl_runs import CASES, LONG, make

LIMITS = 20

pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs, which change with each version


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    yield
    capsys.readouterr()


@pytest.mark.parametrize("name", CASES)
def test_without_a_limit_every_bit_is_the_trainers_own(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rows": 44, "dropout": 0.1, "changed": {"max_steps": 10}}
    plain = make(name, tmp_path, **options)
    expected = run(plain)
    ours = run(make(name, tmp_path, with_us=True, **options))
    assert plain.state.global_step == 10
    assert len(plain.train_dataset) % 8  # the last batch of an epoch is smaller
    assert all(map(torch.equal, ours[0], expected[0]))
    assert ours[1] == expected[1]
    assert ours[2] == expected[2]


@pytest.mark.parametrize("name", CASES)
def test_in_microbatches_all_that_is_logged_is_the_same(name: str, tmp_path: Path) -> None:
    """TRL computes logarithms of probabilities in fp32, whatever the model's type is."""
    plain = make(name, tmp_path)
    ours = make(name, tmp_path, with_us=True, microbatch_size=3, eval_microbatch_size=3)
    expected, found = run(plain), run(ours)
    close = 1e-12 if name == "Reward" else 1e-7
    assert ours.automicro.last.num_microbatches > 1
    assert furthest(found[0], expected[0]) < close
    for row, other in zip(found[1], expected[1], strict=True):
        assert row == pytest.approx(other, rel=2e-6, abs=2e-6)
    evaluated, wanted = ours.evaluate(), plain.evaluate()
    for key, value in wanted.items():
        if not key.endswith(("runtime", "per_second")):
            assert evaluated[key] == pytest.approx(value, rel=2e-6, abs=2e-6), key


KINDS = ("SFT", "DPO", "Reward")


def peak_of(trainer: Any, *, evaluates: bool = False) -> int:
    with MemoryBudget("4GiB") as budget:
        trainer.evaluate() if evaluates else trainer.train()
    return budget.peak_bytes


@pytest.mark.parametrize(("bf16", "close"), [(False, 1e-6), (True, 1e-3)])
@pytest.mark.parametrize("name", [*KINDS, "SFT, without padding"])
def test_at_half_of_the_peak_the_trainer_dies_and_with_the_line_it_does_not(
    name: str, bf16: bool, close: float, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**LONG, "dtype": torch.float32}
    options["changed"] = {**LONG["changed"], "bf16": bf16}
    if "padding" in name:
        options["changed"]["max_length"] = None
    plain = make(name, tmp_path, **options)
    with MemoryBudget("4GiB") as budget:
        expected = run(plain)
    held = budget.peak_bytes // 2
    with pytest.raises(torch.OutOfMemoryError), MemoryBudget(held):
        make(name, tmp_path, **options).train()
    ours = make(name, tmp_path, with_us=True, **options)
    with MemoryBudget(held):
        found = run(ours)
    assert ours.automicro.microbatch_size < 8
    assert losses(found[1]) == pytest.approx(losses(expected[1]), rel=close)
    assert found[1][-2]["num_tokens"] == expected[1][-2]["num_tokens"]
    assert found[2] == expected[2]


@pytest.mark.parametrize("name", KINDS)
def test_in_float64_parameters_are_as_close_as_with_trls_own_accumulation(
    name: str, tmp_path: Path
) -> None:
    """Of SFT and DPO TRL adds the gradient of the head up in fp32, however a batch is cut."""
    plain = make(name, tmp_path, **LONG)
    with MemoryBudget("4GiB") as budget:
        expected = run(plain)[0]
    ours = make(name, tmp_path, with_us=True, **LONG)
    with MemoryBudget(budget.peak_bytes // 2):
        found = run(ours)[0]
    assert ours.automicro.microbatch_size < 8
    pieces = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    options = {**LONG, "changed": {**LONG["changed"], **pieces}}
    theirs = furthest(run(make(name, tmp_path, **options))[0], expected)
    if name == "Reward":
        assert furthest(found, expected) < 1e-12
    else:
        assert theirs > 1e-10
        assert furthest(found, expected) < 1e-6


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("options", [{}, {"microbatch_size": 3}])
def test_a_loss_scale_moves_as_it_does_without_us(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Of fp16, on a device without fp16: the scale grows, overflows, and a step is left out."""
    found = []
    for with_us in (False, True):
        trainer = make(name, tmp_path, with_us=with_us, dtype=torch.float32, rows=44, **options)
        scales = Scales(trainer, 2.0**126).seen
        found.append((scales, run(trainer)))
    (expected, plain), (got, ours) = found
    moves = list(itertools.pairwise(expected))
    assert any(after > before for before, after in moves)
    assert any(after < before for before, after in moves)
    assert got == expected
    assert losses(ours[1]) == pytest.approx(losses(plain[1]), rel=1e-6)
    if options:
        assert furthest(ours[0], plain[0]) < 1e-5
    else:
        assert all(map(torch.equal, ours[0], plain[0]))


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= 2


@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(name: str, tmp_path: Path) -> None:
    """Also where the checkpoint is the plain trainer's and we go on, and the other way round."""
    options: dict[str, Any] = {"dropout": 0.1, "rows": 36}
    options["changed"] = {"save_strategy": "steps", "save_steps": 2}
    expected = run(make(name, tmp_path / "whole", **options))
    for first in (False, True):
        for then in (False, True):
            folder = tmp_path / f"{first}{then}"
            stopped = make(name, folder, with_us=first, **options)
            stopped.add_callback(Stop())
            stopped.train()
            resumed = make(name, folder, with_us=then, **options)
            resumed.train(resume_from_checkpoint=True)
            assert stopped.state.global_step == 2
            assert resumed.state.global_step == 5
            assert all(map(torch.equal, parameters(resumed), expected[0]))
            assert losses(logged(resumed)) == losses(expected[1])


@pytest.mark.parametrize("name", KINDS)
def test_an_evaluation_in_less_memory_has_the_same_metrics(name: str, tmp_path: Path) -> None:
    plain = make(name, tmp_path, **LONG)
    with MemoryBudget("4GiB") as budget:
        expected = plain.evaluate()
    with pytest.raises(torch.OutOfMemoryError), MemoryBudget(budget.peak_bytes * 6 // 10):
        make(name, tmp_path, **LONG).evaluate()
    ours = make(name, tmp_path, with_us=True, **LONG)
    with MemoryBudget(budget.peak_bytes * 6 // 10):
        found = ours.evaluate()
    assert ours.automicro.eval_microbatch_size < 8
    assert set(found) == set(expected)
    for key, value in expected.items():
        if not key.endswith(("time", "per_second")):
            assert found[key] == pytest.approx(value, rel=2e-6, abs=2e-6), key


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", KINDS)
def test_at_any_limit_it_is_right_or_says_that_a_row_is_too_large(
    name: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**LONG, "rows": 12}
    plain = make(name, tmp_path, **options)
    expected = run(plain)
    most = peak_of(make(name, tmp_path, **options))
    ended, refused = 0, 0
    for number in range(1, LIMITS + 1):
        ours = make(name, tmp_path, with_us=True, **options)
        try:
            with MemoryBudget(most * number // LIMITS):
                found = run(ours)
        except SampleTooLargeError:
            refused += 1
            assert all(each.grad is None for each in ours.model.parameters())
            continue
        ended += 1
        assert furthest(found[0], expected[0]) < (1e-12 if name == "Reward" else 1e-6)
        for row, other in zip(found[1], expected[1], strict=True):
            assert row == pytest.approx(other, rel=2e-6, abs=2e-6)
    assert ended >= LIMITS // 3
    assert ended + refused == LIMITS


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", KINDS)
def test_one_rank_out_of_memory_leaves_both_where_ddp_alone_ends(name: str, tmp_path: Path) -> None:
    """With accumulation: SFT's sums by the items of all ranks, and means of pairs."""
    for found in torchrun("tests.integrations.transformers_ranks", tmp_path, name, 2):
        plain, ours = found["losses"]
        assert found["microbatch_size"] == 4
        assert found["differs"] < 1e-6
        assert ours == pytest.approx(plain, rel=1e-6)
        cut, whole = found["evaluations"]
        assert cut == pytest.approx(whole, rel=1e-6)


def test_pairs_are_cut_as_pairs() -> None:
    batch = {"input_ids": torch.arange(8), "ref_chosen_logps": torch.arange(4), "name": "kept"}
    part = Pairs(batch).take(1, 3)
    assert part.num_rows == 2
    assert part.flat()["input_ids"].tolist() == [1, 2, 5, 6]
    assert part.flat()["ref_chosen_logps"].tolist() == [1, 2]
    assert part.flat()["name"] == "kept"
    with pytest.raises(ValueError, match="4 pairs has a tensor of 3 rows"):
        Pairs({**batch, "odd": torch.arange(3)}).take(0, 1)


@pytest.mark.parametrize("loss_type", ["aot", "sft", "bco_pair"])
def test_a_loss_that_compares_pairs_is_refused(loss_type: str, tmp_path: Path) -> None:
    trainer = make("DPO", tmp_path)
    trainer.loss_types = [loss_type]
    with pytest.raises(ValueError, match=f"loss_type={loss_type} compares the pairs .* whole with"):
        enable(trainer)
    enable(trainer, microbatch_size=None)


def test_trainers_that_make_their_batches_are_refused_by_name(tmp_path: Path) -> None:
    trainer = make("SFT", tmp_path)
    kind = type("KTOTrainer", (type(trainer).__mro__[2],), {"__module__": "trl.trainer.kto"})
    trainer.__class__ = kind
    with pytest.raises(ValueError, match="TRL's KTOTrainer makes its batches inside the step"):
        enable(trainer)


def test_what_was_logged_is_from_every_row_once(tmp_path: Path) -> None:
    ours = make("Reward", tmp_path, with_us=True, microbatch_size=1)
    found = run(ours)[1]
    expected = run(make("Reward", tmp_path))[1]
    for name in ("min_reward", "max_reward", "mean_reward", "accuracy", "margin", "num_tokens"):
        assert [row[name] for row in found if name in row] == pytest.approx(
            [row[name] for row in expected if name in row], abs=1e-12
        )


VARIANTS: list[dict[str, Any]] = [
    {},
    {"with_us": True, "microbatch_size": 3, "eval_microbatch_size": 3},
]


@pytest.mark.parametrize("name", ["DPO", "Reward"])
def test_pairs_of_a_collator_of_ones_own_are_cut_as_pairs(name: str, tmp_path: Path) -> None:
    found = []
    for options in VARIANTS:
        trainer = make(name, tmp_path, **options)
        trainer.data_collator = functools.partial(trainer.data_collator)
        found.append((run(trainer), trainer.evaluate()["eval_loss"]))
    (plain, expected), (ours, evaluated) = found
    assert furthest(ours[0], plain[0]) < (1e-12 if name == "Reward" else 1e-7)
    assert evaluated == pytest.approx(expected, rel=2e-6)


def test_prompts_that_are_learned_count_the_first_token_of_a_row(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    found = []
    for options in VARIANTS:
        config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
        trainer = make("SFT", tmp_path, peft_config=config, **options)
        found.append((run(trainer)[1], trainer.evaluate()))
    (expected, plain), (told, ours) = found
    for row, other in zip(told, expected, strict=True):
        assert row == pytest.approx(other, rel=2e-6, abs=2e-6)
    for key in ("eval_loss", "eval_mean_token_accuracy", "eval_entropy"):
        assert ours[key] == pytest.approx(plain[key], rel=2e-6), key


def test_a_subclass_with_a_loss_of_its_own_declares_tokens_and_is_right(tmp_path: Path) -> None:
    """Its evaluation is a mean over shifted targets, as its model's is."""
    found = []
    for options in VARIANTS:
        declared: dict[str, Any] = {"loss_average": "tokens"} if options else {}
        trainer = make("SFT", tmp_path, **options, **declared)

        def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
            return super(type(self), self).compute_loss(*args, **kwargs)

        names = {"compute_loss": compute_loss, "__module__": __name__}
        trainer.__class__ = type("Own", (type(trainer),), names)
        found.append((run(trainer)[1], trainer.evaluate()))
    (expected, plain), (told, ours) = found
    assert losses(told) == pytest.approx(losses(expected), rel=2e-6)
    assert ours["eval_loss"] == pytest.approx(plain["eval_loss"], rel=2e-6)
