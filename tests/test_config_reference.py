"""The keys: the same as the Trainer's options, each documented once."""

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from automicro.checkpoints.store import CheckpointConfig
from automicro.cli.commands.config import documentation, markdown_page, read_entries
from automicro.cli.config.keys import GROUPS, KEYS
from automicro.cli.config.schema import (
    RunConfig,
    TrainerConfig,
    defaults,
    defaults_inside,
    keys_inside,
    type_in_words,
)
from automicro.data import LengthBatchSampler
from automicro.features import WORDS
from automicro.microbatcher import Microbatcher
from automicro.trainer.evaluators import Evaluator
from automicro.trainer.trainer import Trainer
from tests.config_jobs import JOB, build_trainer, load_config

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = inspect.signature(Trainer).parameters

# What a config cannot say as a value: it is made, by nodes under the same name.
MADE = {
    "model",
    "train_dataloader",
    "eval_dataloader",
    "loss_fn",
    "forward",
    "optimizer",
    "scheduler",
    "metrics",
    "update_metric",
    "count_tokens",
    "count_seconds",
    "callbacks",
    "loggers",
    "checkpoint",
}
# Further modules would have to be shared with the forward: nodes make things of their own.
ONLY_IN_PYTHON = {"modules"}


def test_every_plain_option_of_the_trainer_is_there_with_the_same_default() -> None:
    plain = {each.name: each.default for each in fields(TrainerConfig)}
    options = {
        name: option.default
        for name, option in OPTIONS.items()
        if name not in MADE and name not in ONLY_IN_PYTHON
    }
    assert plain == options


def test_every_plain_option_of_the_primitive_is_there() -> None:
    known = {each.name for each in fields(TrainerConfig)} | MADE | ONLY_IN_PYTHON
    # The Trainer scales the loss itself, for fp16, and listens itself; state is carried from batch
    # to batch in loops of people's own; a seed says that a run is to be repeatable; and trainers of
    # others have state, averages and ranks of their own.
    others = {"backward", "carry_layout", "features", "repeatable"}
    others |= {"state", "eval_loss_average", "scales_for_ranks"}
    assert {*inspect.signature(Microbatcher).parameters, *WORDS} - known <= others


def test_everything_that_is_made_has_a_key() -> None:
    keys = {each.name for each in fields(RunConfig)}
    assert set(OPTIONS) >= MADE
    assert keys >= MADE
    of_a_run = {"weights", "global_batch_size", "eval_global_batch_size", "run_dir"}
    of_a_run.add("sampling_mode")
    assert keys - {each.name for each in fields(TrainerConfig)} - MADE == of_a_run


@pytest.mark.parametrize(
    ("section", "owner", "renamed"),
    [("checkpoint", CheckpointConfig, {}), ("eval_dataloader", Evaluator, {"dataloader": "data"})],
)
def test_the_keys_inside_of_a_key_are_those_of_what_is_made(
    section: str, owner: type, renamed: dict[str, str]
) -> None:
    options = inspect.signature(owner).parameters
    assert [renamed.get(name, name) for name in options] == list(keys_inside(section))
    for name, option in options.items():
        if name not in renamed and option.default is not inspect.Parameter.empty:
            assert defaults_inside(section)[name] == option.default, name


def test_each_key_stands_in_one_group() -> None:
    assert sorted(KEYS) == sorted({each.name for each in fields(RunConfig)})
    assert sum(len(keys) for keys in GROUPS.values()) == len(KEYS)


def test_the_keys_of_sampling_are_those_of_the_sampler() -> None:
    options = dict(inspect.signature(LengthBatchSampler).parameters)
    for name in ("dataset", "rank", "world_size"):  # which the run knows
        del options[name]
    assert set(options) == set(keys_inside("sampling_mode"))
    given = defaults_inside("sampling_mode")
    for name, option in options.items():
        if option.default is not inspect.Parameter.empty and name != "seed":
            assert given[name] == option.default, name


INSIDE = tuple(f"{key}.{name}" for key in KEYS for name in keys_inside(key))


@pytest.mark.parametrize("key", KEYS + INSIDE)
def test_every_key_is_explained_in_the_words_of_a_config(key: str) -> None:
    meaning = documentation()[key]
    assert len(meaning) > (20 if key in KEYS else 8)
    assert "None" not in meaning
    assert "``" not in meaning
    assert "see `Microbatcher`" not in meaning
    assert type_in_words(key)


def test_entries_are_read_whole_and_in_one_line() -> None:
    class Documented:
        """Something.

        Args:
            first: begins here,
                goes on: here, and ``{a: b}`` too.
            second: is short.

        Raises:
            ValueError: never.
        """

    assert read_entries(Documented) == {
        "first": "begins here, goes on: here, and ``{a: b}`` too.",
        "second": "is short.",
    }


def test_the_page_in_the_documentation_is_current() -> None:
    written = (ROOT / "docs" / "configuration_keys.md").read_text(encoding="utf-8")
    assert written == markdown_page(), (
        "run python -m automicro config --keys --markdown > docs/configuration_keys.md"
    )


def test_the_page_has_a_row_for_every_key() -> None:
    page = markdown_page()
    for key in KEYS + INSIDE:
        assert page.count(f"\n| `{key}` | ") == 1
    for group in GROUPS:
        assert f"\n## {group}\n" in page


def test_defaults_are_those_of_a_config_that_sets_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB, encoding="utf-8")
    config = load_config("job.yaml")
    for key, default in defaults().items():
        if f"{key}:" not in JOB:
            value = getattr(config, key)
            assert (list(value) if isinstance(value, tuple) else value) == default, key


def test_every_plain_option_reaches_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB, encoding="utf-8")
    taken: dict[str, object] = {}
    monkeypatch.setattr(
        "automicro.cli.config.build.Trainer", lambda *_, **options: taken.update(options)
    )
    build_trainer(load_config("job.yaml", ["accumulate_batches=2", "non_finite=skip"]))
    assert set(taken) == set(OPTIONS) - {"model", "train_dataloader"} - ONLY_IN_PYTHON
    assert (taken["accumulate_batches"], taken["non_finite"]) == (2, "skip")
