"""Config keys match the Trainer's options, and each is documented once."""

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
# Additional modules must be shared with the forward, but each node creates a new object.
ONLY_IN_PYTHON = {"modules", "features"}
WITHOUT_KEY = {"carry_layout", "repeatable", "state", "scales_for_ranks"}


def test_every_trainer_and_microbatcher_option_has_key() -> None:
    of_a_run = {"weights", "global_batch_size", "eval_global_batch_size", "run_dir", "max_time"}
    of_makers = {"sampling_mode", "parameter_groups"}
    options = {*OPTIONS, *WORDS} - ONLY_IN_PYTHON - WITHOUT_KEY
    assert set(KEYS) - of_a_run - of_makers == options
    # The Trainer itself scales the loss for fp16 and listens to events; only custom loops carry
    # state from batch to batch; a seed makes a run repeatable; and only other trainers pass their
    # own state, averages and ranks.
    others = {"backward", *ONLY_IN_PYTHON, *WITHOUT_KEY}
    assert {*inspect.signature(Microbatcher).parameters, *WORDS} - set(KEYS) <= others


def test_defaults_and_types_match_signatures() -> None:
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


def test_each_row_belongs_to_key_and_resolves() -> None:
    assert sorted(KEYS) == sorted([*defaults(), *BATCH_SIZES])
    assert {*KEYS, *INSIDE} >= ROWS.keys()
    for row in ROWS.values():
        assert all(map(pkgutil.resolve_name, filter(None, (row.choices, row.read))))


def test_every_key_is_explained_in_config_terms() -> None:
    for key, meaning in documentation().items():
        assert len(meaning) > (20 if key in KEYS else 8), key
        for of_python in ("None", "``", "see `Microbatcher`"):
            assert of_python not in meaning, key
        assert type_in_words(key), key


def test_docstring_entries_are_joined_into_one_line() -> None:
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


def test_defaults_match_minimal_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB, encoding="utf-8")
    config = load_config("job.yaml")
    for key, default in defaults().items():
        if f"{key}:" not in JOB:
            value = getattr(config, key)
            assert (list(value) if isinstance(value, tuple) else value) == default, key


def test_every_plain_option_reaches_trainer(
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
