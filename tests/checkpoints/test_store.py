"""Checkpoint store: the newest and best checkpoint, retention, and options."""

from pathlib import Path

import pytest
import torch

from automicro.checkpoints import writing
from automicro.checkpoints.manifest import FORMAT, MANIFEST, write_manifest
from automicro.checkpoints.reading import load_checkpoint
from automicro.checkpoints.store import CheckpointConfig, CheckpointStore
from automicro.errors import CheckpointError, CheckpointWarning


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_other_format_is_refused_and_kept(store: CheckpointStore, mocker) -> None:
    store.save({"x": 1}, step=1)
    mocker.patch("automicro.checkpoints.manifest.FORMAT", FORMAT + 1)
    store.save({"x": 2}, step=2)
    mocker.stopall()
    with pytest.raises(CheckpointError, match=f"format {FORMAT + 1}.*Use the version"):
        store.newest()
    assert load_checkpoint(store.folder / "00001-step-1").state == {"x": 1}

    CheckpointStore(store.folder, keep_last=1).save({"x": 3}, step=3)
    assert names(store) == ["00002-step-2", "00003-step-3"]


def test_newest_checkpoint_is_last_saved_not_highest_step(
    store: CheckpointStore,
) -> None:
    for step in (10, 20, 5, 10):
        store.save({"x": step}, step=step)
    assert names(store) == ["00001-step-10", "00002-step-20", "00003-step-5", "00004-step-10"]
    newest = store.newest()
    assert newest is not None
    assert (newest.step, newest.path.name) == (10, "00004-step-10")


def test_name_taken_by_another_process_is_skipped(store: CheckpointStore, mocker) -> None:
    store.save({"x": 1}, step=1)
    mocker.patch.object(writing, "list_checkpoints", return_value=[])
    assert store.save({"x": 2}, step=1).name == "00002-step-1"


def test_only_last_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=2)
    losses = [0.9, 0.1, 0.5, float("nan"), 0.3, 0.8, 0.7]
    for step, loss in enumerate(losses, start=1):
        store.save({"step": step}, step=step, metrics={"eval/loss": loss})
    assert [name.partition("-")[2] for name in names(store)] == [
        f"step-{step}" for step in (2, 5, 6, 7)
    ]
    highest = CheckpointStore(tmp_path, keep_last=1, keep_best=1, best_mode="max")
    for kept, step in ((store, 2), (highest, 6)):
        best = kept.best()
        assert best is not None
        assert best.step == step
    highest.save({}, step=8, metrics={"eval/loss": 0.8})  # of equal values, the newer one is kept
    assert [name.partition("-")[2] for name in names(store)] == ["step-8"]


def test_missing_best_metric_warns_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_best=1, best_metric="accurracy")
    store.save({}, step=0)
    with pytest.warns(CheckpointWarning, match="no metric 'accurracy'.*there are: accuracy"):
        store.save({}, step=1, metrics={"accuracy": 0.5})
    store.save({}, step=2, metrics={"accuracy": 0.5})


def test_metrics_accept_tensors_and_any_float(store: CheckpointStore) -> None:
    store.save({}, step=1, metrics={"a": torch.tensor(0.5), "b": float("inf"), "c": 3})
    assert store.load().metrics == {"a": 0.5, "b": float("inf"), "c": 3.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_last": 0}, "keep_last=0 must be at least 1"),
        ({"keep_last": True}, "keep_last is True"),
        ({"keep_best": -1}, "keep_best=-1"),
        ({"best_mode": "maximum"}, r"did you mean 'max'"),
        ({"interval": "1 epoch"}, r"interval='1 epoch' .*did you mean '1ep'"),
        ({"resume": "Auto"}, r"did you mean 'auto'"),
        ({"resume": "last"}, "use one of auto, never"),
        ({"resume": ""}, "resume='' is not a path"),
        ({"folder": " "}, "folder=' ' is not a path"),
    ],
)
def test_invalid_options_are_refused(options: dict, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        CheckpointConfig(**{"folder": "checkpoints"} | options)


@pytest.mark.parametrize("resume", ["auto", "never", "runs/other/checkpoints", Path("anything")])
def test_valid_resume_options_are_accepted(resume: Path | str) -> None:
    assert CheckpointConfig(folder="checkpoints", interval=None, resume=resume).resume == resume


def test_interval_without_unit_is_refused() -> None:
    with pytest.raises(TypeError, match="has no unit"):
        CheckpointConfig(folder="checkpoints", interval=100)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [-1, 1.0, True, "3"])
def test_step_must_be_nonnegative_integer(store: CheckpointStore, step: int) -> None:
    with pytest.raises(ValueError, match="is no number of batches"):
        store.save({}, step=step)


def test_manifest_is_written_last(store: CheckpointStore, mocker) -> None:
    written: list[set[str]] = []

    def spy(new, **kwargs):
        written.append(set(new.sums))
        write_manifest(new, **kwargs)

    mocker.patch.object(writing, "write_manifest", spy)
    path = store.save({"x": torch.ones(2)}, step=1)
    assert written == [{each.name for each in path.iterdir()} - {MANIFEST}]
