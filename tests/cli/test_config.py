"""Configs are read and merged, trainers are built from them, and each key is documented once."""

import inspect
import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from automicro.cli.commands.config import describe_keys, documentation
from automicro.cli.config.build import Recipe
from automicro.cli.config.keys import GROUPS, KEYS
from automicro.cli.config.keys import OPTIONS as ROWS
from automicro.cli.config.load import escape, read_config, rows_to_load, to_yaml
from automicro.cli.config.nodes import CallConfig
from automicro.cli.config.schema import (
    BATCH_SIZES,
    alternatives,
    defaults,
    keys_inside,
    type_in_words,
)
from automicro.cli.config.sources import merge, read_file
from automicro.data import LengthBatchSampler
from automicro.errors import ConfigError
from automicro.features import WORDS, NonFinite
from automicro.microbatcher import Microbatcher
from automicro.trainer.trainer import Trainer
from tests.cli.conftest import DIGITS, Command
from tests.config_jobs import JOB, args_of, build_trainer, job, load_config

DATA = "{call: torch.utils.data.DataLoader, args: {dataset: [1, 2, 3], batch_size: 2}}"
LOGGER = '{call: automicro.loggers.JSONLinesLogger, args: {path: "${run_dir}/log.jsonl"}}'
STOPPING = "{call: automicro.callbacks.EarlyStopping, args: {patience: 2}}"


@pytest.fixture(autouse=True)
def configs(job_folder: None) -> None:
    for name in ("base.yaml", "job.yaml"):
        Path(name).write_text(JOB, encoding="utf-8")


def write(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


# Reading


def test_overrides_set_nested_keys_mappings_and_list_items() -> None:
    config = job(
        "optimizer.args.lr=1e-3",
        "model={call: torch.nn.Bilinear}",
        "model.args.bias=false",
        "scheduler.call=a.b",
        "metrics.loss.call=c.d",
        "train_dataloader.args.dataset.1=7",
        "max_duration=3ep",
        "max_duration=4ep",
    )
    assert args_of(config, "optimizer") == {"lr": 0.001}
    assert config.model == CallConfig(call="torch.nn.Bilinear", args={"bias": False})
    assert config.scheduler["call"] == "a.b"
    assert config.metrics["loss"]["call"] == "c.d"
    assert args_of(config, "train_dataloader")["dataset"] == [1, 7, 3]
    assert config.max_duration == "4ep"


def test_node_with_other_call_drops_earlier_arguments() -> None:
    other = write("adam.yaml", "optimizer: {call: torch.optim.Adam}\n")
    assert args_of(load_config(["base.yaml", other]), "optimizer") == {}
    same = write("same.yaml", "optimizer: {call: torch.optim.SGD, args: {momentum: 0.9}}\n")
    assert args_of(load_config(["base.yaml", same]), "optimizer") == {"lr": 0.1, "momentum": 0.9}
    earlier = {"loss_fn": {"call": "a.B", "args": {"weight": {"call": "c.D", "args": {"x": 1}}}}}
    later = {"loss_fn": {"args": {"weight": {"call": "e.F"}}}}
    before = repr((earlier, later))
    assert merge(earlier, later)["loss_fn"]["args"]["weight"] == {"call": "e.F"}
    assert repr((earlier, later)) == before


def test_now_is_same_for_all_configs() -> None:
    config = job("run_dir=runs/${now:%Y-%m-%d_%H-%M-%S-%f}")
    assert str(config.run_dir).startswith("runs/2")
    assert job("run_dir=runs/${now:%Y-%m-%d_%H-%M-%S-%f}").run_dir == config.run_dir


def test_written_config_reads_back_identically() -> None:
    overrides = [
        f"eval_dataloader={{seen: {DATA}, new: {{data: {DATA}, max_batches: 3, interval: null}}}}",
        f"callbacks=[{STOPPING}]",
        f"loggers=[{LOGGER}]",
        "checkpoint={keep_last: 2}",
        "run_dir=runs/first",
        "max_time=2h",
        "optimizer.args.lr=${seed}",
        "seed=1",
    ]
    loaded = read_config(["job.yaml"], overrides)
    for values in (loaded.written, loaded.everything):
        write("again.yaml", to_yaml(values))
        assert load_config("again.yaml") == loaded.config
        # Another run writes to its own files.
        other = load_config("again.yaml", ["run_dir=b"])
        assert other.checkpoint["folder"] == "b/checkpoints"
        assert other.loggers[0]["args"] == {"path": "b/log.jsonl"}
    assert loaded.written["checkpoint"] == {"keep_last": 2}
    assert loaded.written["eval_dataloader"]["new"]["max_batches"] == 3
    assert "metrics" not in loaded.written["eval_dataloader"]["new"]
    assert loaded.written["optimizer"]["args"] == {"lr": "${seed}"}
    assert args_of(loaded.config, "optimizer") == {"lr": 1}
    loaded = read_config(["job.yaml"], ["run_dir=runs/${now:%f}"])
    assert loaded.written["run_dir"] == loaded.config.run_dir


LEAVES: st.SearchStrategy[object] = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
LEAVES |= st.floats(allow_nan=False) | st.from_regex(r"[-+.0-9eE_:xo${}\\]{1,8}", fullmatch=True)
NAMES = st.from_regex(r"[a-z_]{1,5}", fullmatch=True)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(values=st.dictionaries(st.sampled_from(["a", "b", "on"]), TREES, min_size=1))
@pytest.mark.sweep
def test_any_values_survive_write_and_read(values: Mapping[str, object]) -> None:
    if "???" in repr(values):
        return  # OmegaConf's mark of a missing value
    read = read_file(Path(write("values.yaml", to_yaml(escape(values)))))[0]
    assert OmegaConf.to_container(OmegaConf.create(read), resolve=True) == values


@pytest.mark.parametrize(
    ("rows", "devices", "accumulated", "remedy"),
    [
        (100, 8, 1, "8 × 1: give a multiple of 8, such as 96"),
        (3, 8, 1, "8 × 1: give a multiple of 8, such as 8"),
        (0, 1, 1, "1 × 1: give a multiple of 1, such as 1"),
    ],
)
def test_indivisible_batch_size_error_names_numbers(
    rows: int, devices: int, accumulated: int, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        rows_to_load(rows, num_devices=devices, accumulate_batches=accumulated)
    shares, _, use = remedy.partition(": ")
    assert str(caught.value) == (
        f"global_batch_size={rows} cannot be divided into {shares} equal shares (devices × "
        f"accumulate_batches) of at least 1 row: {use}"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    {
        "model: {call: torch.nn.Linear, args: {in_featurs: 8}}": (
            "model: torch.nn.Linear takes no argument 'in_featurs'"
        ),
        "max_time: ${sede}": "max_time=${sede}: Interpolation key 'sede' not found",
        "loss_fn: {call: nn.CrossEntropyLoss}": "loss_fn.call='nn.CrossEntropyLoss': there is no",
        "metrics: {accuracy: {cal: a.B}}": "metrics.accuracy has an unknown key 'cal'",
        "max_durations: 3": "unknown key 'max_durations'",
        "seed: many": "seed='many' (text): expected a whole number or null",
    }.items(),
)
def test_config_error_names_its_source(line: str, message: str, automicro: Command) -> None:
    write("also.yaml", f"# more\n{line}\n")
    override = line.replace(": ", "=", 1)
    places = {"also.yaml": "also.yaml:2", override: f"the override '{override}'"}
    for given_, place in places.items():
        err = automicro("config", "job.yaml", given_, code=2).err
        assert err.startswith(f"automicro: {place}: {message}")
    # A later override can correct an error.
    automicro("config", "job.yaml", "seed=many", "seed=1")


# Building


def test_seed_alone_determines_initial_weights() -> None:
    def weights(seed: int) -> Any:
        return next(Recipe(job(f"seed={seed}")).make_model().parameters()).detach().clone()

    first = weights(5)
    torch.rand(3)
    assert torch.equal(weights(5), first)
    assert not torch.equal(weights(6), first)


def test_loss_average_can_come_from_node(monkeypatch: pytest.MonkeyPatch) -> None:
    write("averages.py", "def by_rows():\n    return lambda batch: len(batch[0])\n")
    monkeypatch.syspath_prepend(".")
    build_trainer(job("loss_average={call: averages.by_rows}"))


def test_loggers_record_effective_config(monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "rows.py",
        "import torch\n\n\ndef loader():\n"
        "    return [(torch.ones(2, 8), torch.zeros(2, dtype=torch.long))]\n",
    )
    monkeypatch.syspath_prepend(".")
    Path("a").mkdir()
    loader = "train_dataloader={call: rows.loader}"
    build_trainer(job(loader, f"loggers=[{LOGGER}]", "run_dir=a", "seed=4")).fit()
    first, *rest = map(json.loads, Path("a/log.jsonl").read_text().splitlines())
    assert first["run"]["config"]["optimizer"] == {"call": "torch.optim.SGD", "args": {"lr": 0.1}}
    assert first["run"]["config"]["seed"] == 4
    assert first["run"]["model"] == "Linear"
    assert rest[0]["train/microbatch_size"] == 2


TRAINING = (
    "train_dataloader={call: torch.utils.data.DataLoader, args: "
    "{dataset: [[1], [2, 2], [3], [4, 4]], batch_size: 2, "
    "collate_fn: {call: pkgutil.resolve_name, args: {name: builtins.list}}}}"
)


def sampler_of(*overrides: str) -> LengthBatchSampler:
    loader = Recipe(job(TRAINING, *overrides)).make("train_dataloader")
    assert isinstance(loader.batch_sampler, LengthBatchSampler)
    return loader.batch_sampler


def test_sampling_mode_makes_sampler_of_loader() -> None:
    sampler = sampler_of("sampling_mode=fixed", "seed=3")
    assert (sampler.mode, sampler.seed) == ("fixed", 3)
    assert sorted(map(len, sampler)) == [2, 2]
    assert sampler_of("sampling_mode.mode=fixed", "sampling_mode.seed=5", "seed=3").seed == 5
    function = "{call: pkgutil.resolve_name, args: {name: builtins.len}}"
    mode = f"sampling_mode={{mode: duration, lengths: {function}, batch_length: 2, shuffle: false}}"
    assert list(sampler_of(mode)) == [[0], [1], [2], [3]]
    assert list(sampler_of(mode, "sampling_mode.batch_length=3.0")) == [[0, 1], [2, 3]]
    listed = "sampling_mode={mode: 1D-bucketing, lengths: [1, 9, 1, 9], bucket_edges: [5]}"
    assert list(sampler_of(listed, "sampling_mode.shuffle=false")) == [[0, 2], [1, 3]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_digits_accuracy_exceeds_97_percent() -> None:
    summary = build_trainer(load_config(DIGITS, ["progress=false"])).fit()
    assert summary.eval_metrics["accuracy"] > 0.97
    assert summary.train_ooms >= 2
    assert summary.eval_ooms >= 1
    assert summary.steps == 120


# Keys

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
    made_of_nothing: dict[str, object] = {"metrics": {}, "callbacks": [], "loggers": []}
    config = load_config("job.yaml")
    for name, default in defaults().items():
        if name in OPTIONS:
            theirs = OPTIONS[name].default
            expected = None if theirs is inspect.Parameter.empty else theirs
            assert default == made_of_nothing.get(name, expected), name
        if f"{name}:" not in JOB:
            value = getattr(config, name)
            assert (list(value) if isinstance(value, tuple) else value) == default, name
    assert alternatives("memory_limit") == (str, int, float, NoneType)
    assert alternatives("max_duration") == (str,)
    assert alternatives("microbatch_size") == (int, str, CallConfig, NoneType)
    assert defaults("eval_dataloader")["interval"] == "inherited"


def test_every_key_is_explained_once_in_config_terms() -> None:
    assert sorted(KEYS) == sorted([*defaults(), *BATCH_SIZES])
    assert {*KEYS, *INSIDE} >= ROWS.keys()
    for row in ROWS.values():
        assert all(map(pkgutil.resolve_name, filter(None, (row.choices, row.read))))
    for key, meaning in documentation().items():
        assert len(meaning) > (20 if key in KEYS else 8), key
        for of_python in ("None", "``", "see `Microbatcher`"):
            assert of_python not in meaning, key
        assert type_in_words(key), key
    described = [name for keys in describe_keys().values() for name in keys]
    named = sorted(each for each in described if each not in ("call", "args"))
    assert named == sorted(KEYS + INSIDE)
    assert {*GROUPS} <= {*describe_keys()}


def test_every_plain_option_reaches_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, Any] = {}
    monkeypatch.setattr(
        "automicro.cli.config.build.Trainer", lambda *_, **options: taken.update(options)
    )
    build_trainer(job("accumulate_batches=2", "non_finite=skip"))
    assert set(taken) == set(OPTIONS) - {"model", "modules", *WORDS}
    assert taken["accumulate_batches"] == 2
    [feature] = taken["features"]
    assert (type(feature), feature.mode) == (NonFinite, "skip")
