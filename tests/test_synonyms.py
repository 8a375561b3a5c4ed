"""Names that other trainers have: what is said of them in a config, an option and an argument."""

import inspect
from pathlib import Path
from typing import Any, cast

import pytest

from automicro.cli import main
from automicro.cli.config.keys import KEYS
from automicro.migration import PRECISION_SYNONYMS, SYNONYMS, synonym_of
from automicro.options import PRECISIONS, check_precision_name
from automicro.trainer.composer import refuse_unknown
from automicro.trainer.trainer import Trainer
from tests.config_jobs import JOB, complaint, load_config

NAMES = [name for names, _ in SYNONYMS for name in names]
EPOCHS = "it has a unit, ep for epochs: write max_duration=3ep"
ACCUMULATION = (
    "batches are cut into as many microbatches as memory asks for, so microbatch_size=auto is all "
    "it takes; to step once in several batches, write accumulate_batches=4"
)
PROCESSES = (
    "each process has one device, so start as many: torchrun --nproc-per-node 2 -m automicro train "
    "job.yaml parallel=ddp (or fsdp)"
)
RESUME = (
    "write checkpoint.resume=a, a checkpoint or a folder of them; a run with a run_dir and "
    "checkpoint={} goes on by itself when it is started again"
)

IN_CONFIGS = {
    "learning_rate=0.1": (
        "unknown key 'learning_rate' (did you mean 'optimizer.args.lr'?): it is an argument of the "
        "optimizer: write optimizer.args.lr=0.1"
    ),
    "Learning-Rate=0.1": (
        "unknown key 'Learning-Rate' (did you mean 'optimizer.args.lr'?): it is an argument of the "
        "optimizer: write optimizer.args.lr=0.1"
    ),
    "weight_decay=0.1": (
        "unknown key 'weight_decay' (did you mean 'optimizer.args.weight_decay'?): it is an "
        "argument of the optimizer: write optimizer.args.weight_decay=0.1"
    ),
    "batch_size=64": (
        "unknown key 'batch_size' (did you mean 'global_batch_size'?): write "
        "global_batch_size=64, with batch_size: ${global_batch_size} under train_dataloader.args; "
        "or "
        "train_dataloader.args.batch_size=64, the rows that one device loads"
    ),
    "epochs=3": f"unknown key 'epochs' (did you mean 'max_duration'?): {EPOCHS}",
    "max_epochs=3": f"unknown key 'max_epochs' (did you mean 'max_duration'?): {EPOCHS}",
    "max_steps=3": (
        "unknown key 'max_steps' (did you mean 'max_duration'?): it has a unit, ba for batches: "
        "write max_duration=3ba"
    ),
    "gradient_accumulation_steps=4": (
        "unknown key 'gradient_accumulation_steps' (did you mean 'microbatch_size'?): "
        + ACCUMULATION
    ),
    "gpus=2": f"unknown key 'gpus' (did you mean 'parallel'?): {PROCESSES}",
    "devices=2": f"unknown key 'devices' (did you mean 'parallel'?): {PROCESSES}",
    "strategy=fsdp": "unknown key 'strategy' (did you mean 'parallel'?): write parallel=fsdp",
    "gpus=8": f"unknown key 'gpus' (did you mean 'parallel'?): {PROCESSES.replace('2', '8')}",
    "warmup_steps=50": (
        "unknown key 'warmup_steps' (did you mean 'scheduler'?): write scheduler={call: "
        "automicro.schedules.cosine_with_warmup, args: {warmup: 50ba, total: 500ba}}"
    ),
    "dtype=bfloat16": "unknown key 'dtype' (did you mean 'precision'?): write precision=bf16",
    "epochs=1.5": (  # no epochs
        "unknown key 'epochs' (did you mean 'max_duration'?): it has a unit, ep for epochs: write "
        "max_duration=2ep"
    ),
    "num_nodes=2": f"unknown key 'num_nodes' (did you mean 'parallel'?): {PROCESSES}",
    "accelerator=gpu": ("unknown key 'accelerator' (did you mean 'device'?): write device=cuda"),
    "resume_from=a": f"unknown key 'resume_from' (did you mean 'checkpoint.resume'?): {RESUME}",
    "ckpt_path=a": f"unknown key 'ckpt_path' (did you mean 'checkpoint.resume'?): {RESUME}",
    "fp16=true": (
        "unknown key 'fp16' (did you mean 'precision'?): write precision=bf16, or fp16, which "
        "scales the loss by itself"
    ),
    "precision=float16": (
        "precision='float16' is not known (did you mean 'fp16'?); use one of fp32, bf16, fp16"
    ),
    "precision=16": (
        "precision='16' is not known (did you mean 'fp16'?); use one of fp32, bf16, fp16"
    ),
    "precision=bf16-mixed": (
        "precision='bf16-mixed' is not known (did you mean 'bf16'?); use one of fp32, bf16, fp16"
    ),
}


@pytest.mark.parametrize(("override", "message"), IN_CONFIGS.items(), ids=IN_CONFIGS)
def test_a_config_that_speaks_of_other_trainers_is_told_what_stands_here(
    override: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint(override).endswith(message)


IN_OPTIONS = {
    "--learning-rate=0.1": "(did you mean 'optimizer.args.lr=0.1'?)",
    "--epochs": "(did you mean 'max_duration=2ep'?)",
    "--gpus=2": "(did you mean 'parallel=ddp'?)",
    "--max-duration=3ep": "(did you mean 'max_duration=3ep'?)",
}


@pytest.mark.parametrize(("option", "hint"), IN_OPTIONS.items(), ids=IN_OPTIONS)
def test_an_option_of_others_is_answered_with_a_key(
    option: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "job.yaml", option]) == 2
    assert f"unknown option '{option}' {hint}: use some of" in capsys.readouterr().err


IN_PYTHON = {
    "learning_rate": (
        "here it is optimizer (functools.partial(torch.optim.AdamW, lr=0.001), or one that is made)"
    ),
    "batch_size": (
        "here it is train_dataloader (DataLoader(dataset, batch_size=512), the rows of a whole "
        "optimization batch: it is cut into microbatches that fit)"
    ),
    "max_epochs": "here it is max_duration (text with a unit, 'ep' for epochs: '2ep')",
    "gradient_accumulation_steps": (
        "here it is microbatch_size (batches are cut into as many microbatches as memory asks for, "
        "so 'auto' is all it takes; to step once in several batches, pass accumulate_batches=4)"
    ),
    "devices": (
        "here it is parallel ('ddp' or 'fsdp'; each process has one device, so start as many: "
        "torchrun --nproc-per-node 2 train.py)"
    ),
    "ckpt_path": (
        "here it is checkpoint (CheckpointConfig(folder=…, resume='PATH'); with the folder alone, "
        "a run goes on by itself when it is started again)"
    ),
}


@pytest.mark.parametrize(("name", "message"), IN_PYTHON.items(), ids=IN_PYTHON)
def test_an_argument_of_others_is_refused_with_what_stands_here(name: str, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        Trainer(**cast(dict[str, Any], {name: None}))
    assert str(caught.value) == f"Trainer has no argument {name!r}: {message}"


def test_a_value_that_was_written_comes_back() -> None:
    with pytest.raises(TypeError) as caught:
        Trainer(**cast(dict[str, Any], {"lr": 0.1, "num_epochs": 30, "ckpt_path": "runs/a"}))
    said = str(caught.value)
    assert "functools.partial(torch.optim.AdamW, lr=0.1)" in said
    assert "'ep' for epochs: '30ep'" in said
    assert "resume='runs/a'" in said


@pytest.mark.parametrize("name", NAMES)
def test_every_synonym_is_no_name_of_ours_and_names_what_there_is(name: str) -> None:
    synonym = synonym_of(name)
    assert synonym is not None
    parameters = inspect.signature(Trainer).parameters
    assert name not in {*KEYS, *parameters}
    assert synonym.argument in parameters
    assert synonym.key.partition(".")[0] in KEYS
    assert synonym.example.startswith(synonym.key)
    with pytest.raises(TypeError, match=r"here it is|Composer's"):
        refuse_unknown({name: None}, kind=Trainer)


def test_no_name_stands_for_two_things() -> None:
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize(
    "example", sorted({each.example for _, each in SYNONYMS if each.key in KEYS})
)
def test_what_is_to_be_copied_is_right(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB, encoding="utf-8")
    node = ["scheduler={call: a.b}"] if example.startswith("scheduler.") else []
    load_config("job.yaml", [*node, example])


@pytest.mark.parametrize(("theirs", "ours"), PRECISION_SYNONYMS.items(), ids=str)
def test_a_precision_of_others_is_named_as_it_is_here(theirs: str, ours: str) -> None:
    assert theirs not in PRECISIONS
    assert check_precision_name(ours) == ours
    with pytest.raises(ValueError, match=f"did you mean '{ours}'"):
        check_precision_name(theirs.upper())
