"""Replay of a batch that did not fit, from a file that contains only data."""

import dataclasses
import json
import re
from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from automicro import Microbatcher, SampleTooLargeError
from automicro.tools.replay import replay
from automicro.trainer.failed_batch import (
    FailedBatch,
    UnknownClassError,
    UnreadableBatchError,
    load_batch,
    save_batch,
)
from automicro.values import same_values
from tests.trainer.rehearsals import Model, loader_of, make_trainer
from tests.trainer.runs import assert_same


def failed(batch: Any, phase: str = "train") -> FailedBatch:
    words = {"message": "too large", "where": "in a test", "device": "cpu"}
    return FailedBatch(batches=[batch], phase=phase, limit_bytes=4096, **words)


def tokens(rows: int, length: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(32, (rows, length), generator=torch.Generator().manual_seed(3))
    return drawn, drawn


@dataclasses.dataclass
class Pair:
    inputs: Tensor
    names: list[str]


Named = namedtuple("Named", ["inputs", "targets"])


def test_saved_batch_is_loaded_unchanged(tmp_path: Path) -> None:
    half = [torch.ones(3, dtype=torch.bfloat16), b"bytes", 2.5, True]
    batch = {"a": (torch.ones(2), half), "b": [torch.zeros(1), "text", None], "c": np.arange(4.0)}
    save_batch(tmp_path / "batch.pt", failed(batch))
    again = load_batch(tmp_path / "batch.pt")
    assert same_values(again.batches[0], batch)
    assert dataclasses.replace(again, batches=[]) == dataclasses.replace(failed(batch), batches=[])


def test_custom_classes_come_only_from_given_batch(
    tmp_path: Path,
) -> None:
    path = tmp_path / "batch.pt"
    batch = Pair(torch.ones(2, 3), ["x", "y"])
    save_batch(path, failed(batch))
    with pytest.raises(UnknownClassError, match=r"holds a tests.tools.test_replay.Pair.*like="):
        load_batch(path)
    again = load_batch(path, like=Pair(torch.zeros(1), [])).batches[0]
    assert type(again) is Pair
    assert torch.equal(again.inputs, batch.inputs)
    assert again.names == ["x", "y"]
    save_batch(path, failed(Named(torch.ones(2), torch.zeros(2))))
    assert type(load_batch(path, like=Named(1, 2)).batches[0]) is Named
    save_batch(path, failed(UserDict(inputs=torch.ones(2))))
    assert type(load_batch(path).batches[0]) is dict
    assert type(load_batch(path, like=UserDict(inputs=0)).batches[0]) is UserDict


class Runs:
    """Writes a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "was run")


def test_loading_runs_no_code_from_file(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    torch.save({"format": "automicro: a batch that did not fit", "x": Runs(trap)}, tmp_path / "a")
    (tmp_path / "b").write_text("no batch at all")
    torch.save({"batches": [1]}, tmp_path / "c")
    for name in "abc":
        with pytest.raises(UnreadableBatchError, match="holds no batch that automicro has saved"):
            load_batch(tmp_path / name)
    assert not trap.exists()
    with pytest.raises(
        UnreadableBatchError, match=r"holds a tests\.tools\.test_replay\.Runs, which"
    ):
        save_batch(tmp_path / "d", failed({"x": Runs(trap)}))


def test_only_the_rows_are_saved_and_not_too_many(tmp_path: Path, mocker: Any) -> None:
    save_batch(tmp_path / "batch.pt", failed(torch.zeros(1_000_000)[:10]))
    assert (tmp_path / "batch.pt").stat().st_size < 10_000
    mocker.patch("automicro.trainer.failed_batch.MOST_BYTES", 1000)
    with pytest.raises(UnreadableBatchError, match=r"has 3\.91 KiB, but at most 1000 bytes"):
        save_batch(tmp_path / "other.pt", failed(torch.zeros(1000)))
    assert not (tmp_path / "other.pt").exists()


def limit_of(rows: int, length: int) -> int:
    """Return the bytes that this many rows need, including all fixed memory."""
    model, own = Model(), {"loss_fn": nn.CrossEntropyLoss(), "memory_limit": "1GiB"}
    optimizer = torch.optim.AdamW(model.parameters())
    microbatcher = Microbatcher(model, optimizer=optimizer, probe=False, **own)  # type: ignore[arg-type]
    with microbatcher.rehearsing():
        peak = microbatcher.backward(tokens(rows, length)).peak_bytes
    assert peak is not None
    return int(peak)


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_replay_leaves_no_trace(phase: str) -> None:
    model, untouched = Model(dropout=0.2), Model(dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": optimizer}
    before = torch.get_rng_state()
    limit = limit_of(2, 64)
    report = replay(failed(tokens(8, 64), phase), model, memory_limit=limit, **options)
    assert report.fits
    assert report.microbatch_size is not None
    assert report.tried[0] == 8
    assert report.microbatch_size < 8
    assert report.peak_bytes is not None
    assert report.peak_bytes <= limit == report.limit_bytes
    assert f"fits now: {report.num_microbatches} × {report.microbatch_size} of 8 rows" in str(
        report
    )
    json.dumps(report.to_dict())
    too_small = limit_of(2, 24) if phase == "train" else limit_of(1, 8)
    small = replay(failed(tokens(8, 64), phase), model, memory_limit=too_small, **options)
    assert not small.fits
    assert small.tried[-1] == 1
    assert small.residents.optimizer_state > 0
    assert "does not fit: not even 1 row of 8" in str(small)
    assert_same(model, untouched)
    assert not optimizer.state
    assert all(each.grad is None for each in model.parameters())
    assert model.training
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("where", ["train", "eval"])
def test_run_saves_batch_that_does_not_fit(where: str, tmp_path: Path) -> None:
    lengths = [4] * 8 + [90] * 8
    short, long = loader_of([4] * 16), loader_of(lengths)
    limit = limit_of(8, 4)
    trainer = make_trainer(
        Model(),
        short if where == "eval" else long,
        eval_dataloader=long if where == "eval" else None,
        memory_limit=limit,
        rehearse=None,
    )
    trainer.keep_failures_in(tmp_path / "run")
    with pytest.raises(SampleTooLargeError) as caught:
        trainer.fit()
    [note] = [each for each in caught.value.__notes__ if "was saved to" in each]
    path = tmp_path / "run" / "failed-batch-0001.pt"
    assert f"the batch was saved to {path}; to run it alone: automicro replay {path} CONFIG" in note
    found = load_batch(path)
    assert found.batches[0][0].shape == (8, 90)
    assert found.phase == ("eval" if where == "eval" else "train")
    assert found.limit_bytes == limit
    assert re.search({"eval": "evaluation, batch 2"}.get(where, r"batch 2"), found.where)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": optimizer}
    assert not replay(path, model, memory_limit=limit, **options).fits


def test_failed_save_does_not_hide_original_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = make_trainer(Model(), loader_of([90] * 8), memory_limit=limit_of(1, 4), rehearse=None)
    trainer.keep_failures_in(tmp_path / "file")
    with pytest.raises(SampleTooLargeError) as caught:
        trainer.fit()
    assert any("the batch could not be saved (" in each for each in caught.value.__notes__)
