"""Jobs with rows of varying length learn in little memory and are exact."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import instructions
import sounds
from automicro import Microbatcher
from automicro.cli.config.build import Recipe
from automicro.data import LengthBatchSampler, read_lengths
from automicro.features import MicrobatchUnit
from automicro.trainer.report import FitSummary
from tests.config_jobs import build_trainer, load_config
from tests.trainer.runs import assert_same

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
STOP = "tests.trainer.runs.StopAfter"


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def job(name: str, *options: str) -> Any:
    return build_trainer(load_config(CONFIGS / f"{name}.yaml", ["progress=false", *options]))


@pytest.mark.sweep
def test_speech_job_learns_in_little_memory() -> None:
    summary = job("speech").fit()
    assert summary.eval_metrics["letter_error_rate"] < 0.05
    assert summary.train_ooms == summary.eval_ooms == 0, "a rehearsal has found what fits"
    assert summary.microbatch_unit == "seconds"
    assert summary.peak_memory_bytes is not None
    assert summary.peak_memory_bytes <= 3500 * 1024


@pytest.mark.slow
def test_instructions_job_learns_in_little_memory() -> None:
    summary = job("instructions", "max_duration=100ba", "eval_interval=100ba").fit()
    assert summary.eval_metrics["accuracy"] > 0.97
    assert summary.train_ooms == summary.eval_ooms == 0
    assert summary.rehearsed is not None
    assert summary.num_microbatches > 1


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "limit"),
    [("speech", "1500KiB"), pytest.param("instructions", "3500KiB", marks=pytest.mark.slow)],
)
def test_job_without_rehearsal_recovers_from_oom(name: str, limit: str) -> None:
    short = ["eval_interval=null", "max_duration=16ba", "rehearse=null", f"memory_limit={limit}"]
    trainer = job(name, *short)
    first: list[float] = []
    trainer._run.optimizer.register_step_post_hook(
        lambda *_: first.append(trainer.state.loss or 0.0)
    )
    summary = trainer.fit()
    assert summary.train_ooms >= 1
    assert summary.rehearsed is None
    assert len(first) == summary.steps == 16
    assert summary.train_loss < 0.95 * first[0]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["instructions", pytest.param("speech", marks=pytest.mark.slow)])
def test_job_resumed_within_epoch_matches_uninterrupted_run(name: str, tmp_path: Path) -> None:
    def train(*overrides: str) -> tuple[FitSummary, nn.Module]:
        trainer = job(name, "eval_interval=null", "max_duration=12ba", *overrides)
        return trainer.fit(), trainer._run.model

    kept = f"checkpoint={{folder: {tmp_path}}}"
    _, uninterrupted = train()
    stopped, before = train(kept, f"callbacks=[{{call: {STOP}, args: {{batches: 5}}}}]")
    summary, after = train(kept)
    assert (stopped.steps, summary.steps) == (5, 12)
    assert summary.rehearsed is None, "the sizes are those of the checkpoint"
    assert_same(after, uninterrupted)
    assert not all(map(torch.equal, before.parameters(), after.parameters()))


@pytest.mark.sweep
def test_length_sampler_leaves_little_padding() -> None:
    """Compare it with batches of a fixed number of rows."""
    for name, lengths, most in (("speech", "seconds", 0.15), ("instructions", "input_ids", 0.35)):
        made = Recipe(load_config(CONFIGS / f"{name}.yaml", [])).make("train_dataloader")
        sampler = made.batch_sampler
        rows = round(sampler.num_rows / len(sampler))
        plain = LengthBatchSampler(made.dataset, mode="fixed", lengths=lengths, batch_size=rows)
        held = read_lengths(lengths, made.dataset)
        ways = [[len(rows) * held[rows].max() for rows in each.plan()] for each in (sampler, plain)]
        assert held.sum() > (1 - most) * sum(ways[0])
        assert held.sum() < 0.4 * sum(ways[1])


def test_padding_changes_scores_only_if_lengths_include_it() -> None:
    model, batch, _ = speech()
    row = int(batch["audio_lengths"].argmin())
    length = int(batch["audio_lengths"][row])
    alone = {name: value[row : row + 1] for name, value in batch.items()}
    alone["audio"] = alone["audio"][:, :length]
    with torch.no_grad():
        expected = model(**alone)["logits"][0]
        assert torch.allclose(model(**batch)["logits"][row, :length], expected, rtol=0, atol=1e-12)
        whole = torch.full_like(batch["audio_lengths"], batch["audio"].shape[1])
        unmasked = model(**(batch | {"audio_lengths": whole}))["logits"][row, :length]
        assert not torch.allclose(unmasked, expected, rtol=0, atol=1e-6)


def speech() -> tuple[Any, Any, dict[str, Any]]:
    model = sounds.Recognizer(width=12).double()
    batch = next(iter(sounds.loader("train", batch_size=16, num_rows=16)))
    batch["audio"] = batch["audio"].double()
    return model, batch, {"loss_average": "samples"}


def chat() -> tuple[Any, Any, dict[str, Any]]:
    small: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    more: Any = {
        "num_attention_heads": 2,
        "use_cache": False,
        "vocab_size": instructions.VOCABULARY,
    }
    model = LlamaForCausalLM(LlamaConfig(bos_token_id=None, eos_token_id=None, **small, **more))

    def forward(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    def count(batch: Any) -> Any:
        return (batch["labels"][:, 1:] != instructions.IGNORED).sum()

    batch = next(iter(instructions.loader("train", batch_size=24, num_rows=24)))
    return model.double(), batch, {"forward": forward, "loss_average": count}


@pytest.mark.parametrize(
    ("make", "unit", "size"),
    [
        (speech, "seconds", 4),
        (speech, "seconds", 60),
        (speech, "tokens", 1000),
        (chat, "tokens", 100),
        pytest.param(chat, "tokens", 400, marks=pytest.mark.sweep),
    ],
)
def test_gradient_matches_whole_batch(make: Any, unit: str, size: int) -> None:
    torch.manual_seed(0)
    model, batch, options = make()
    whole = options["forward"](model, batch) if make is chat else model(**batch)["loss"]
    whole.backward()
    expected = gradient(model)
    model.zero_grad()
    microbatcher = Microbatcher(
        model, microbatch_size=size, features=[MicrobatchUnit(unit)], **options
    )
    result = microbatcher.backward(batch)
    assert result.num_microbatches > 1
    assert float(result.loss) == pytest.approx(float(whole.detach()), abs=1e-12)
    assert (gradient(model) - expected).abs().max() < 1e-9


def test_frame_count_matches_sound_duration() -> None:
    for row in sounds.Sounds(20, seed=3).rows:
        assert len(row["frames"]) == pytest.approx(row["seconds"] * 50, abs=1.01)
        assert 1 <= len(row["letters"]) <= sounds.LONGEST


def test_answers_count_by_instructed_step() -> None:
    for row in instructions.Instructions(50, seed=3).rows:
        answer = row["input_ids"][row["labels"] != instructions.IGNORED]
        step = int(row["input_ids"][0]) - instructions.NUMBERS + 1
        assert ((answer[1:] - answer[:-1]) % instructions.NUMBERS == step).all()
        assert len(row["input_ids"]) <= 96


def test_unknown_splits_are_refused() -> None:
    for made in (sounds.loader, instructions.loader):
        with pytest.raises(ValueError, match="say 'train' or 'eval'"):
            made("test")
