"""Each OOM writes a report, and a failed report does not stop the run."""

import contextlib
import errno
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import SampleTooLargeError, torch_private_execution
from automicro.callbacks import OutOfMemoryReport, oom_report
from automicro.errors import AutomicroWarning
from automicro.features import RememberSizes
from tests.callbacks.runs import assert_equal, copy_of, trainer_with
from tests.trainer.runs import FEATURES, make_loader


def reports(folder: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def run_out_of_memory(report: OutOfMemoryReport, **options: Any) -> Any:
    loader = make_loader(rows=300, batch_size=256)
    # Each run finds its own sizes, independent of earlier runs.
    settings = {"memory_limit": "200KiB", "features": [RememberSizes(False)], **options}
    return trainer_with(report, train_dataloader=loader, **settings).fit()


def test_each_oom_writes_report_with_position_and_cause(tmp_path: Path) -> None:
    summary = run_out_of_memory(OutOfMemoryReport(tmp_path / "oom"))
    found = reports(tmp_path / "oom")
    assert len(found) == summary.train_ooms >= 2
    first, last = found[0], found[-1]
    numbers = dict.fromkeys(("epoch", "epoch_batch", "batch", "samples"), 0)
    assert first["where"] == {"phase": "train", "tokens": None, **numbers}
    assert (first["attempt"], first["num_rows"], first["num_microbatches"]) == (1, 256, 1)
    assert first["microbatch_size"] == {"before": 256, "after": 128}
    assert last["microbatch_size"]["after"] == summary.microbatch_size
    shape = {"path": "0", "shape": [256, FEATURES], "dtype": "float32", "device": "cpu"}
    assert first["batch"][0] == shape
    assert "out of memory" in first["message"]
    assert first["peak_bytes"] <= 200 * 1024 == first["limit_bytes"]
    assert first["allocated_bytes_after"] < first["peak_bytes"]
    parameters, batch = first["held"][0], first["held"][-1]
    assert (parameters["kind"], batch["kind"]) == ("parameters", "batch")
    assert parameters["num_bytes"] > parameters["largest_bytes"] >= 64 * 64 * 4
    assert batch["num_bytes"] == 256 * (FEATURES * 4 + 8)
    assert list((tmp_path / "oom").glob("*.part")) == []


def test_evaluation_oom_writes_report(tmp_path: Path) -> None:
    large = make_loader(rows=2000, batch_size=2000)
    report = OutOfMemoryReport(tmp_path)
    trainer_with(report, eval_dataloader=large, memory_limit="400KiB").fit()
    found = reports(tmp_path)
    assert {each["where"]["phase"] for each in found} == {"eval"}
    assert found[0]["where"]["batch"] == 4
    assert found[0]["batch"][0]["shape"] == [2000, FEATURES]


def test_error_names_its_report(tmp_path: Path) -> None:
    with pytest.raises(SampleTooLargeError) as raised:
        run_out_of_memory(OutOfMemoryReport(tmp_path), memory_limit="80KiB")
    assert reports(tmp_path)[-1]["microbatch_size"] == {"before": 1, "after": None}
    last = max(tmp_path.glob("*.json"))
    assert str(raised.value).endswith(f" More in {last} (automicro doctor reads it).")
    with pytest.raises(torch.OutOfMemoryError) as fixed:
        run_out_of_memory(OutOfMemoryReport(tmp_path / "fixed"), microbatch_size=128)
    (only,) = (tmp_path / "fixed").glob("*.json")
    assert f"More in {only} (automicro doctor reads it)." in "\n".join(fixed.value.__notes__)


def test_max_reports_limits_folder_and_keeps_earlier_reports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "oom-0001.json").write_text("earlier")
    for _ in range(2):
        run_out_of_memory(OutOfMemoryReport(tmp_path, max_reports=2))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["oom-0001.json", "oom-0002.json"]
    assert (tmp_path / "oom-0001.json").read_text() == "earlier"
    assert json.loads((tmp_path / "oom-0002.json").read_text())["attempt"] == 1
    with pytest.raises(SampleTooLargeError) as raised:
        run_out_of_memory(OutOfMemoryReport(tmp_path, max_reports=2), memory_limit="80KiB")
    assert "oom-" not in str(raised.value)
    assert caplog.text.count("Raise max_reports") == 3  # once per run


def test_full_disk_gives_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    allocator = Allocator(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("automicro.files.replace", full)
        with pytest.warns(AutomicroWarning, match="No space left on device.*continues without it"):
            summary = run_out_of_memory(OutOfMemoryReport(tmp_path / "oom"))
    assert summary.train_ooms >= 2
    assert not list((tmp_path / "oom").glob("*.json"))
    (tmp_path / "file").write_text("")
    with pytest.warns(AutomicroWarning, match="name another folder"):
        run_out_of_memory(OutOfMemoryReport(tmp_path / "file" / "oom"))
    monkeypatch.setattr(oom_report, "dump_memory_snapshot", full)
    with pytest.warns(AutomicroWarning, match="pickle could not be written.*No space left"):
        run_out_of_memory(OutOfMemoryReport(tmp_path), model=Full(allocator, 64), memory_limit=None)
    assert len(reports(tmp_path)) == 2


class Allocator:
    """A stand-in for CUDA's allocator that refuses requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.observers: list[Any] = []
        self.held = "empty"
        attach = "torch._C._cuda_attach_out_of_memory_observer"
        monkeypatch.setattr(attach, self.observers.append, raising=False)
        monkeypatch.setattr(torch_private_execution, "_observes_shortage", False)
        monkeypatch.setattr(oom_report, "can_record_memory", lambda device: True)
        monkeypatch.setattr(oom_report, "dump_memory_snapshot", self.dump)

    def dump(self, path: str) -> None:
        Path(path).write_text(self.held)

    def refuse(self) -> None:
        for observe in self.observers:
            observe(0, 1024, 4096, 0)


class Full(nn.Module):
    """Runs out of memory above `most` rows; `asks_first` adds a refusal that it survives."""

    def __init__(self, allocator: Allocator, most: int, *, asks_first: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)
        # A strong reference would be rolled back with the model after a failed attempt.
        self.allocator = weakref.ref(allocator)
        self.most, self.asks_first = most, asks_first

    def forward(self, x: Tensor) -> Tensor:
        allocator = self.allocator()
        assert allocator is not None
        allocator.held = f"{len(x)} rows"
        try:
            if self.asks_first:
                allocator.refuse()
            if len(x) > self.most:
                allocator.refuse()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 KiB.")
            out: Tensor = self.layer(x)
            return out
        finally:
            allocator.held = "empty"


def test_snapshot_shows_memory_at_oom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    run_out_of_memory(OutOfMemoryReport(tmp_path), model=Full(allocator, 64), memory_limit=None)
    snapshots = [path.read_text() for path in sorted(tmp_path.glob("*.pickle"))]
    assert snapshots == ["256 rows", "128 rows"]
    assert len(allocator.observers) == 1, "torch keeps observers for good"
    assert list(tmp_path.glob("*.part")) == []
    allocator.refuse()  # after the run
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_unneeded_snapshot_is_removed(
    is_interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    model = Full(Allocator(monkeypatch), 256, asks_first=True)
    if is_interrupted:
        monkeypatch.setattr(oom_report, "describe_failure", interrupted)
        model.most = 64
    with contextlib.suppress(KeyboardInterrupt):
        run_out_of_memory(OutOfMemoryReport(tmp_path), model=model, memory_limit=None)
    assert list(tmp_path.iterdir()) == []


class Uneven(nn.Module):
    """A model with a small and a large part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small = nn.Linear(FEATURES, 4)
        self.large = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.large(self.small(x))
        return out


def test_later_reports_name_modules_that_held_activations(tmp_path: Path) -> None:
    model, plain = Uneven(), Uneven()
    summary = run_out_of_memory(OutOfMemoryReport(tmp_path), model=model)
    found = reports(tmp_path)
    assert summary.train_ooms == len(found) >= 2
    second, last = found[1], found[-1]
    assert second["inside"][0] == "Uneven"
    assert second["inside"][-1].startswith("large.")
    rows = summary.microbatch_size  # of the successful attempt; the report has twice that
    assert last["microbatch_size"] == {"before": 2 * rows, "after": rows}
    by_module = {each["owner"]: each for each in last["held"] if each["kind"] == "activations"}
    assert by_module["large.0"]["num_bytes"] == 2 * (-(-rows * 256 * 4 // 512) * 512)
    assert by_module["small"]["num_bytes"] == 2 * (-(-rows * 4 * 4 // 512) * 512)
    assert torch.nn.modules.module._global_forward_hooks == {}
    loader = make_loader(rows=300, batch_size=256)
    trainer_with(model=plain, train_dataloader=loader, memory_limit="200KiB").fit()
    assert_equal(copy_of(model), copy_of(plain))  # reports do not change training
