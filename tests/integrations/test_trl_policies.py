"""Policy trainers of TRL: completions are drawn and scored once per batch."""

import tempfile
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import trl
from datasets import Dataset
from peft import LoraConfig

from automicro import LossAverageError
from automicro.integrations.transformers import enable
from tests.integrations.both import max_diff
from tests.integrations.transformers_runs import run
from tests.integrations.trl_runs import ON_THE_CPU, WORDS, model, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

# Ratios are 1 in the first of two passes over the same completions, and clipped in the second.
TWICE: dict[str, Any] = {"num_iterations": 2, "epsilon": 0.01, "beta": 0.1, "max_steps": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"GRPO, {kind}": ("GRPO", {**TWICE, "loss_type": kind}) for kind in ("dapo", "grpo")},
    "GRPO, fixed divisor": ("GRPO", {**TWICE, "loss_type": "dr_grpo"}),
    "GRPO, clipped weights": ("GRPO", {**TWICE, "loss_type": "cispo"}),
    "GRPO, sequences": (
        "GRPO",
        {**TWICE, "epsilon": 0.001, "importance_sampling_level": "sequence", "loss_type": "grpo"},
    ),
    "GRPO, accumulation": ("GRPO", {**TWICE, "gradient_accumulation_steps": 2}),
    "GRPO, evaluation": (
        "GRPO",
        {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8},
    ),
    "GRPO, truncated completions masked": ("GRPO", {**TWICE, "mask_truncated_completions": True}),
    "RLOO": ("RLOO", TWICE),
}


QUICK = ("GRPO, dapo", "GRPO, sequences", "GRPO, truncated completions masked", "RLOO")


def reward(completions: list[str], **_: Any) -> list[float]:
    words = [each.split() for each in completions]
    return [len(each) % 5 + 0.1 * len(set(each)) for each in words]


def make(name: str, **changed: Any) -> Any:
    kind, options = CASES[name]
    config, trainer = (getattr(trl, kind + each) for each in ("Config", "Trainer"))
    prompts = [" ".join(f"w{(7 * i + j) % WORDS}" for j in range(3 + i % 4)) for i in range(16)]
    rows = Dataset.from_dict({"prompt": prompts})
    arguments = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 2,
        "learning_rate": 1e-2,
        **ON_THE_CPU,
        **options,
        **changed,
    }
    return trainer(
        model=model(),
        args=config(**arguments),
        reward_funcs=reward,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer(),
        # The base weights without the adapter serve as the reference model.
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )


def numbers(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def is_of_clock(key: str) -> bool:
        return "time" in key or key.endswith("per_second")

    return [{key: row[key] for key in row if not is_of_clock(key)} for row in log]


@pytest.mark.parametrize(
    "name",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in CASES],
)
def test_policy_training_and_logs_match_whole_batches(name: str) -> None:
    plain = run(make(name))
    whole = run(enable(make(name), microbatch_size=None, eval_microbatch_size=None))
    assert all(map(torch.equal, whole[0], plain[0]))
    assert numbers(whole[1]) == numbers(plain[1])
    ours = enable(make(name), microbatch_size=3, eval_microbatch_size=3)
    found = run(ours)
    assert ours.automicro.last.num_microbatches == 3
    assert max_diff(found[0], plain[0]) < 1e-12
    for row, other in zip(numbers(found[1]), numbers(plain[1]), strict=True):
        assert row.keys() == other.keys()
        for key, number in other.items():
            expected = number if number is None else pytest.approx(number, rel=2e-6, abs=2e-6)
            assert row[key] == expected, key


def test_completions_are_drawn_once_despite_retries() -> None:
    plain = run(make("GRPO, dapo"))
    trainer = make("GRPO, dapo")
    forward = trainer.model.forward

    def failing(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and len(input_ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(input_ids, *args, **kwargs)

    trainer.model.forward = failing
    found = run(enable(trainer))
    assert trainer.automicro.microbatch_size <= 3
    assert trainer.automicro.last.ooms == 0, "the size was found in the first batch"
    assert max_diff(found[0], plain[0]) < 1e-12
    assert [row.get("reward") for row in found[1]] == [row.get("reward") for row in plain[1]]


def test_batch_token_mean_must_be_declared() -> None:
    options: dict[str, Any] = {"loss_type": "bnpo"}
    with pytest.raises(LossAverageError, match="splitting changes this batch"):
        enable(make("GRPO, dapo", **options), microbatch_size=3).train()
    plain = run(make("GRPO, dapo", **options))
    declared = enable(
        make("GRPO, dapo", **options),
        microbatch_size=3,
        loss_average=lambda batch: batch["completion_mask"].sum(),
    )
    # TRL divides in fp32.
    assert max_diff(run(declared)[0], plain[0]) < 1e-5


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"top_entropy_quantile": 0.5}, LossAverageError),  # over all tokens of a batch
        ({"entropy_coef": 0.1}, ValueError),  # a mean over tokens next to a sum over items
    ],
    ids=str,
)
def test_terms_across_microbatches_are_rejected(changed: dict[str, Any], error: Any) -> None:
    with pytest.raises(error):
        enable(make("GRPO, dapo", **changed), microbatch_size=3).train()
