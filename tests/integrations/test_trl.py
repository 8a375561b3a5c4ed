"""The trainers of TRL with one line: pairs in two blocks, padding-free rows, values in lists."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import datasets
from transformers.utils import logging

from automicro import BatchError
from automicro.batch.layout import BatchLayout
from automicro.integrations.transformers import Pairs, enable
from tests.integrations.both import max_diff
from tests.integrations.transformers_runs import losses, run
from tests.integrations.trl_runs import make

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of TRL, which change with each version


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    yield
    capsys.readouterr()


def test_pairs_are_split_together() -> None:
    batch = {"input_ids": torch.arange(8), "ref_chosen_logps": torch.arange(4), "name": "kept"}
    layout = BatchLayout(0)
    part = layout.split(Pairs.read(batch), [1, 2, 1])[1].flat()
    assert part["input_ids"].tolist() == [1, 2, 5, 6]
    assert part["ref_chosen_logps"].tolist() == [1, 2]
    assert part["name"] == "kept"
    with pytest.raises(BatchError, match="rows of the batch do not agree"):
        layout.num_rows(Pairs.read({**batch, "odd": torch.arange(3)}))


@pytest.mark.parametrize("loss_type", ["aot", "sft", "bco_pair"])
def test_loss_that_compares_pairs_is_rejected(loss_type: str, tmp_path: Path) -> None:
    trainer = make("DPO", tmp_path)
    trainer.loss_types = [loss_type]
    with pytest.raises(ValueError, match=f"loss_type={loss_type} compares the pairs .* whole with"):
        enable(trainer)
    enable(trainer, microbatch_size=None)


def test_trainer_that_builds_batches_in_step_is_rejected(tmp_path: Path) -> None:
    trainer = make("SFT", tmp_path)
    kind = type("KTOTrainer", (type(trainer).__mro__[2],), {"__module__": "trl.trainer.kto"})
    trainer.__class__ = kind
    with pytest.raises(ValueError, match="TRL's KTOTrainer builds batches inside the step"):
        enable(trainer)


SIZES = {"microbatch_size": 3, "eval_microbatch_size": 3}
VARIANTS: list[dict[str, Any]] = [{}, {"with_us": True, "options": SIZES}]


@pytest.mark.parametrize("name", ["DPO", "Reward"])
def test_pairs_from_custom_collator_are_split_together(name: str, tmp_path: Path) -> None:
    found = []
    for options in VARIANTS:
        trainer = make(name, tmp_path, **options)
        trainer.data_collator = functools.partial(trainer.data_collator)
        found.append((run(trainer), trainer.evaluate()["eval_loss"]))
    (plain, expected), (ours, evaluated) = found
    assert max_diff(ours[0], plain[0]) < (1e-12 if name == "Reward" else 1e-7)
    assert evaluated == pytest.approx(expected, rel=2e-6)


def test_prompt_tuning_counts_first_token_of_each_row(tmp_path: Path) -> None:
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


def test_subclass_with_declared_token_loss_matches_trainer(tmp_path: Path) -> None:
    """Its evaluation averages over shifted targets, like its model."""
    found = []
    for options in VARIANTS:
        if options:
            options = {**options, "options": {**SIZES, "loss_average": "tokens"}}
        trainer = make("SFT", tmp_path, **options)

        def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
            return super(type(self), self).compute_loss(*args, **kwargs)

        names = {"compute_loss": compute_loss, "__module__": __name__}
        trainer.__class__ = type("Own", (type(trainer),), names)
        found.append((run(trainer)[1], trainer.evaluate()))
    (expected, plain), (told, ours) = found
    assert losses(told) == pytest.approx(losses(expected), rel=2e-6)
    assert ours["eval_loss"] == pytest.approx(plain["eval_loss"], rel=2e-6)
