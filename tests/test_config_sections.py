"""Callbacks, loggers, checkpoints, evaluations by name, and max_time in a config."""

import json
from pathlib import Path

import pytest

from automicro.cli.config.build import Recipe
from automicro.cli.config.load import read_config, to_yaml
from automicro.data import LengthBatchSampler
from automicro.errors import ConfigError
from tests.config_jobs import JOB, build_trainer, job, load_config

DATA = "{call: torch.utils.data.DataLoader, args: {dataset: [1, 2, 3], batch_size: 2}}"
LOGGER = '{call: automicro.loggers.JSONLinesLogger, args: {path: "${run_dir}/log.jsonl"}}'
STOPPING = "{call: automicro.callbacks.EarlyStopping, args: {patience: 2}}"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_written_config_reads_back_identically() -> None:
    Path("job.yaml").write_text(JOB, encoding="utf-8")
    overrides = [
        f"eval_dataloader={{seen: {DATA}, new: {{data: {DATA}, max_batches: 3, interval: null}}}}",
        f"callbacks=[{STOPPING}]",
        f"loggers=[{LOGGER}]",
        "checkpoint={keep_last: 2}",
        "run_dir=runs/first",
        "max_time=2h",
    ]
    loaded = read_config(["job.yaml"], overrides)
    for values in (loaded.written, loaded.everything):
        Path("again.yaml").write_text(to_yaml(values), encoding="utf-8")
        assert load_config("again.yaml") == loaded.config
        # Another run writes to its own files.
        other = load_config("again.yaml", ["run_dir=b"])
        assert other.checkpoint["folder"] == "b/checkpoints"
        assert other.loggers[0]["args"] == {"path": "b/log.jsonl"}
    assert loaded.written["checkpoint"] == {"keep_last": 2}
    assert loaded.written["eval_dataloader"]["new"]["max_batches"] == 3
    assert "metrics" not in loaded.written["eval_dataloader"]["new"]


def test_loggers_record_effective_config() -> None:
    Path("rows.py").write_text(
        "import torch\n\n\ndef loader():\n"
        "    return [(torch.ones(2, 8), torch.zeros(2, dtype=torch.long))]\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(".")
        config = job(
            "train_dataloader={call: rows.loader}", f"loggers=[{LOGGER}]", "run_dir=a", "seed=4"
        )
        Path("a").mkdir()
        build_trainer(config).fit()
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
    """Return the batch sampler of a config."""
    loader = Recipe(job(TRAINING, *overrides)).make("train_dataloader")
    assert isinstance(loader.batch_sampler, LengthBatchSampler)
    return loader.batch_sampler


def test_sampling_mode_uses_loader_batch_size_and_run_seed() -> None:
    sampler = sampler_of("sampling_mode=fixed", "seed=3")
    assert (sampler.mode, sampler.seed) == ("fixed", 3)
    assert sorted(map(len, sampler)) == [2, 2]
    assert sampler_of("sampling_mode.mode=fixed", "sampling_mode.seed=5", "seed=3").seed == 5


def test_sampling_mode_options_may_contain_nodes() -> None:
    function = "{call: pkgutil.resolve_name, args: {name: builtins.len}}"
    mode = f"sampling_mode={{mode: duration, lengths: {function}, batch_length: 2, shuffle: false}}"
    assert list(sampler_of(mode)) == [[0], [1], [2], [3]]
    assert list(sampler_of(mode, "sampling_mode.batch_length=3.0")) == [[0, 1], [2, 3]]
    listed = "sampling_mode={mode: 1D-bucketing, lengths: [1, 9, 1, 9], bucket_edges: [5]}"
    assert list(sampler_of(listed, "sampling_mode.shuffle=false")) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("override", "words"),
    {
        "sampling_mode=durations": "did you mean 'duration'",
        "sampling_mode={lengths: a}": "sampling_mode.mode is missing",
        "sampling_mode={mode: fixed, lenghts: a}": "did you mean 'lengths'",
        "sampling_mode=[fixed]": "is not a mapping",
        "sampling_mode={mode: fixed, shuffle: maybe}": "sampling_mode.shuffle='maybe'",
        "sampling_mode={mode: duration, lengths: {cal: a}}": "sampling_mode.lengths",
        "sampling_mode={mode: duration, lengths: {call: no.such}}": "sampling_mode.lengths.call",
    }.items(),
)
def test_invalid_sampling_mode_is_refused_before_construction(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe(job(TRAINING, override))
    assert words in str(caught.value)
