"""The keys: the same as the Trainer's options, each documented once."""

import inspect
import pkgutil
from pathlib import Path
from types import NoneType
from typing import Any

import pytest

from automicro.cli.commands.config import describe_keys, documentation, read_entries
from automicro.cli.config.keys import GROUPS, KEYS
from automicro.cli.config.keys import OPTIONS as ROWS
from automicro.cli.config.nodes import CallConfig
from automicro.cli.config.schema import (
    BATCH_SIZES,
    alternatives,
    defaults,
    keys_inside,
    type_in_words,
)
from automicro.features import WORDS, NonFinite
from automicro.microbatcher import Microbatcher
from automicro.trainer.trainer import Trainer
from tests.config_jobs import JOB, build_trainer, load_config

OPTIONS = inspect.signature(Trainer).parameters

INSIDE = tuple(f"{key}.{name}" for key in KEYS for name in keys_inside(key))
# Further modules would have to be shared with the forward: nodes make things of their own.
ONLY_IN_PYTHON = {"modules", "features"}
OF_OTHERS = {"carry_layout", "repeatable", "state", "scales_for_ranks"}


def test_every_option_of_the_trainer_and_of_the_primitive_has_a_key() -> None:
    of_a_run = {"weights", "global_batch_size", "eval_global_batch_size", "run_dir", "max_time"}
    of_makers = {"sampling_mode", "parameter_groups"}
    options = {*OPTIONS, *WORDS} - ONLY_IN_PYTHON - OF_OTHERS
    assert set(KEYS) - of_a_run - of_makers == options
    # The Trainer scales the loss itself, for fp16, and listens itself; state is carried from batch
    # to batch in loops of people's own; a seed says that a run is to be repeatable; and trainers of
    # others have state, averages and ranks of their own.
    others = {"backward", *ONLY_IN_PYTHON, *OF_OTHERS}
    assert {*inspect.signature(Microbatcher).parameters, *WORDS} - set(KEYS) <= others


def test_defaults_and_types_are_those_of_the_signatures() -> None:
    plain = {name: value for name, value in defaults().items() if name in OPTIONS}
    made_of_nothing: dict[str, object] = {
        "metrics": {},
        "callbacks": [],
        "loggers": [],
    }
    for name, value in plain.items():
        default = OPTIONS[name].default
        expected = None if default is inspect.Parameter.empty else default
        assert value == made_of_nothing.get(name, expected), name
    assert alternatives("memory_limit") == (str, int, float, NoneType)
    assert alternatives("max_duration") == (str,)
    assert alternatives("microbatch_size") == (int, str, CallConfig, NoneType)
    assert defaults("eval_dataloader")["interval"] == "inherited"


def test_each_row_is_of_a_key_and_names_what_there_is() -> None:
    assert sorted(KEYS) == sorted([*defaults(), *BATCH_SIZES])
    assert {*KEYS, *INSIDE} >= ROWS.keys()
    for row in ROWS.values():
        assert all(map(pkgutil.resolve_name, filter(None, (row.choices, row.read))))


def test_every_key_is_explained_in_the_words_of_a_config() -> None:
    for key, meaning in documentation().items():
        assert len(meaning) > (20 if key in KEYS else 8), key
        for of_python in ("None", "``", "see `Microbatcher`"):
            assert of_python not in meaning, key
        assert type_in_words(key), key


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


def test_every_key_is_described_once_in_its_group() -> None:
    described = [name for keys in describe_keys().values() for name in keys]
    assert sorted(each for each in described if each not in ("call", "args")) == sorted(
        KEYS + INSIDE
    )
    assert {*GROUPS} <= {*describe_keys()}


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
    taken: dict[str, Any] = {}
    monkeypatch.setattr(
        "automicro.cli.config.build.Trainer", lambda *_, **options: taken.update(options)
    )
    build_trainer(load_config("job.yaml", ["accumulate_batches=2", "non_finite=skip"]))
    assert set(taken) == set(OPTIONS) - {"model", "modules", *WORDS}
    assert taken["accumulate_batches"] == 2
    [feature] = taken["features"]
    assert (type(feature), feature.mode) == (NonFinite, "skip")
