"""Reports of out-of-memory errors, one JSON file each."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from automicro.batch.tensors import tensor_leaves
from automicro.errors import AutomicroWarning, describe_error, warn
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.files import write_whole
from automicro.memory.device import allocated_bytes
from automicro.memory.residents import OccupiedDevice
from automicro.options import read_count
from automicro.step.events import Microbatch, OutOfMemory, Resize
from automicro.step.feature import Attempt
from automicro.torch_private import (
    can_record_memory,
    dump_memory_snapshot,
    is_compiled,
    is_uninitialized,
    record_memory_history,
    tell_no_more,
    tell_of_shortage,
)


class OutOfMemoryReport(Callback):
    """Writes a report of each out-of-memory error, recovered from or not.

    Reports are called ``oom-0001.json`` and so on. They hold the place in training, the attempt,
    the microbatch sizes before and after, the shapes of the batch, the message, peak and allocated
    bytes, and the memory needed at any size. The attempt after a failure adds how much each module
    leaves on the device in a forward, and in which modules memory ran out again. ``automicro doctor
    oom-0001.json`` analyzes a report.

    With CUDA's native allocator, a snapshot for https://docs.pytorch.org/memory_viz is saved as
    ``oom-0001.pickle``. It is taken when a request cannot be served, with all tensors still on the
    device. If a library fails without a request to torch's allocator, it is taken after the attempt
    was rolled back. If no size fits, the error names the last file.

    If a file cannot be written (because the disk is full, for example), a warning is issued and the
    run continues.

    Args:
        folder: folder for the files; created if necessary.
        max_reports: maximum number of reports of a run, including before it was resumed.
        snapshot: whether to save snapshots, if available.
        history: number of earlier allocations and releases in a snapshot; 0 for none. Recording
            them costs microseconds each.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> report = OutOfMemoryReport("runs/1/oom", max_reports=5)
        >>> report.written
        0
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_reports: int = 20,
        snapshot: bool = True,
        history: int = 0,
    ) -> None:
        self._folder = Path(folder)
        self._max_reports = read_count("max_reports", max_reports)
        self._snapshot = snapshot
        self._history = read_count("history", history, least=0)
        self._written = 0
        self._batch: Any = None
        self._taken: Path | None = None  # snapshot of this attempt's last refused request
        self._why_not: Exception | None = None
        self._forward: _Forward | None = None  # in an attempt after a failed one
        self._last: tuple[Path, dict[str, Any]] | None = None  # report of the failed attempt

    @property
    def written(self) -> int:
        """Number of reports written in this run."""
        return self._written

    def fit_start(self, run: Run) -> None:
        """Start recording allocations, if requested."""
        if self._history and can_record_memory(run.device):
            record_memory_history(self._history)

    def fit_end(self, run: Run) -> None:
        """Stop recording allocations."""
        if self._history and can_record_memory(run.device):
            record_memory_history(None)

    def batch_start(self, run: Run, batch: Any) -> None:
        """Keep the batch, to describe it in a report."""
        self._batch, self._last = batch, None

    def batch_end(self, *_: Any, **__: Any) -> None:
        """Release the batch."""
        self._batch = self._last = None

    eval_batch_start, eval_batch_end = batch_start, batch_end

    def attempt_start(self, run: Run, attempt: Attempt) -> None:
        """Request a snapshot if memory runs out."""
        self._drop_snapshot()
        if self._takes_snapshots(run):
            # The allocator itself triggers the snapshot: when the error arrives here, the attempt's
            # tensors have been freed, and a snapshot would show a half-empty device.
            tell_of_shortage(self._take_snapshot)

    def forward_start(self, run: Run, microbatch: Microbatch) -> None:
        """Measure the memory of modules, if the previous attempt failed."""
        # One forward is enough, because all microbatches of an attempt are alike.
        if microbatch.attempt.number > 1 and microbatch.index == 0 and self._last is not None:
            self._forward = _Forward(run, microbatch.attempt)
            self._forward.begin()

    def forward_end(self, run: Run, microbatch: Microbatch) -> None:
        """Stop measuring."""
        if self._forward is not None:
            self._forward.end()

    def attempt_end(self, run: Run, attempt: Attempt) -> None:
        """Cancel the snapshot, and drop one from which a library recovered by itself."""
        tell_no_more(self._take_snapshot)
        self._drop_snapshot()
        if self._forward is not None and self._last is not None:
            # The report is rewritten, because modules were not measured in the attempt that it
            # describes.
            path, report = self._last
            self._forward.add_to(report)
            with _saying(lambda: path):
                _write(path, report)
        self._forward = self._last = None

    def oom(self, run: Run, failure: OutOfMemory) -> None:
        """Write a report. `resize` adds the next size later, if there is one."""
        path, self._last = self._folder, None
        tell_no_more(self._take_snapshot)
        if self._forward is not None:
            self._forward.end()
        try:
            if self._written < self._max_reports:
                # No failure to write a report may end the run.
                with _saying(lambda: path):
                    path = self._next_path()
                    report = describe_failure(run, failure, self._batch)
                    if self._forward is not None:
                        self._forward.add_to(report)
                        report["inside"] = self._forward.inside
                    _write(path, report)
                    self._last = path, report
                    failure.reports.append(str(path))
                    path = path.with_suffix(".pickle")
                    # Before this report is counted, so that the last one gets its snapshot, too.
                    if self._takes_snapshots(run):
                        self._keep_snapshot(path)
        # Also after Ctrl-C, so that no snapshot is left behind.
        finally:
            self._written += self._last is not None
            self._drop_snapshot()
            self._forward = None

    def _keep_snapshot(self, path: Path) -> None:
        if self._why_not is not None:
            raise self._why_not
        if self._taken is None:
            dump_memory_snapshot(str(path))
        else:
            self._taken.replace(path)

    def _takes_snapshots(self, run: Run) -> bool:
        has_room = self._written < self._max_reports
        return self._snapshot and has_room and can_record_memory(run.device)

    def _take_snapshot(self) -> None:
        """Take a snapshot. Called by the allocator, which an exception must not reach."""
        self._drop_snapshot()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # The name has the process id, because several processes might share a folder.
            taken = self._folder / f"snapshot-{os.getpid()}.part"
            self._taken = taken
            dump_memory_snapshot(str(taken))
        except Exception as error:  # reported when the report is written
            self._why_not = error

    def _drop_snapshot(self) -> None:
        self._why_not = None
        if self._taken is not None:
            with contextlib.suppress(OSError):  # the disk might be read-only
                self._taken.unlink(missing_ok=True)
            self._taken = None

    def resize(self, run: Run, resize: Resize) -> None:
        """Add the next size to the report."""
        if self._last is not None:
            path, report = self._last
            report["microbatch_size"]["after"] = resize.after
            with _saying(lambda: path):
                _write(path, report)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of reports written."""
        return {"written": self._written}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the number of reports written."""
        self._written = state["written"]

    def _next_path(self) -> Path:
        # Reports of earlier runs are kept, so numbers continue after theirs.
        number = self._written + 1
        while (path := self._folder / f"oom-{number:04d}.json").exists():
            number += 1  # taken by an earlier run
        return path


def _write(path: Path, report: Mapping[str, Any]) -> None:
    text = f"{json.dumps(report, indent=2)}\n".encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write(text))


def describe_failure(run: Run, failure: OutOfMemory, batch: Any) -> dict[str, Any]:
    """Describe an out-of-memory failure as plain values for JSON."""
    attempt, state = failure.attempt, run.state
    is_training = attempt.phase == "train"
    device = OccupiedDevice(run.device, run.modules, run.optimizer)
    residents = device.measure(training=is_training)
    sizes = [
        each.nbytes
        for module in run.modules
        for each in (*module.parameters(), *module.buffers())
        if not is_uninitialized(each)
    ]
    on_device = [each.nbytes for _, each in tensor_leaves(batch) if each.device == run.device]
    held = [
        _held("parameters", "the model", residents.parameters + residents.buffers, sizes),
        _held("gradients", "the parameters", residents.gradients),
        _held("optimizer state", "the optimizer", residents.optimizer_state),
        _held("batch", "the batch", sum(on_device), on_device),
    ]
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "device": str(run.device),
        "message": failure.message,
        "where": {
            "phase": attempt.phase,
            "epoch": state.epoch,
            "epoch_batch": state.epoch_batch,
            "batch": state.batch,
            "samples": state.samples,
            "tokens": state.tokens,
        },
        "attempt": attempt.number,
        "microbatch_size": {"before": attempt.microbatch_size, "after": None},
        "num_rows": attempt.num_rows,
        "num_microbatches": attempt.num_microbatches,
        "batch": _describe_batch(batch),
        "peak_bytes": failure.peak_bytes,
        "allocated_bytes_after": allocated_bytes(run.device),
        # The configured limit, which the device's total does not show.
        "limit_bytes": residents.limit,
        "device_memory": _device_memory(run.device),
        "held": [each for each in held if each["num_bytes"]],
    }


def _held(kind: str, owner: str, num_bytes: int, sizes: Sequence[int] = (0,)) -> dict[str, Any]:
    """Return one holder of memory, in the format of `automicro.tools.doctor.holders.Holder`."""
    return {
        "kind": kind,
        "owner": owner,
        "num_bytes": num_bytes,
        "count": len(sizes),
        "largest_bytes": max(sizes, default=0),
    }


def _device_memory(device: torch.device) -> dict[str, int] | None:
    """Return the memory of the whole device, other processes included, or None if unknown."""
    # Host memory of other processes changes all the time, and did not limit the run.
    if device.type == "cpu":
        return None
    try:
        free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
        reserved_bytes = torch.accelerator.memory_reserved(device)
    # Third-party backends might have all of these functions, some or none.
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return {
        "total_bytes": int(total_bytes),
        "free_bytes": int(free_bytes),
        "reserved_bytes": int(reserved_bytes),
    }


class _Forward:
    """Bytes that each module leaves on the device in the forward of one microbatch.

    Used for one forward after a failure, because two queries of the allocator per module cost
    microseconds each. Compiled models are not measured.
    """

    def __init__(self, run: Run, attempt: Attempt) -> None:
        self._device = run.device
        self._rows = attempt.microbatch_size
        root = type(run.model).__name__
        self._names = {id(part): name or root for name, part in run.model.named_modules()}
        # A hook would break the graph of a compiled model, or cause a recompilation.
        self._looks = not any(map(is_compiled, run.model.modules()))
        self._open: list[int] = []  # ids of modules that are running
        self._bytes = 0  # allocated at the last hook
        self._held: Counter[str] = Counter()
        self._handles: list[Any] = []

    @property
    def inside(self) -> list[str]:
        """Modules in which the forward failed, outermost first; empty if it succeeded."""
        return [self._names[module] for module in self._open]

    def begin(self) -> None:
        if self._looks and allocated_bytes(self._device) is not None:
            self._handles = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave),
            ]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def add_to(self, report: dict[str, Any]) -> None:
        """Add the bytes of modules, largest first, scaled to the size of this report."""
        # The measured attempt was smaller than the one that the report describes.
        share = report["microbatch_size"]["before"] / self._rows
        others = [each for each in report["held"] if each["kind"] != "activations"]
        innermost = self.inside[-1:]
        # The module in which memory ran out is named even if it held nothing yet.
        self._held.update(dict.fromkeys(innermost, 0))
        report["held"] = others + [
            _held("activations", name, round(num_bytes * share))
            for name, num_bytes in self._held.most_common()
            if num_bytes > 0 or name in innermost
        ]

    def _enter(self, module: nn.Module, _: Any) -> None:
        # The hooks are global, so other modules, such as a teacher, might run as well.
        if id(module) in self._names:
            self._turn()
            self._open.append(id(module))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._open:
            self._turn()
            while self._open.pop() != id(module):
                pass  # the model caught the error of a part

    def _turn(self) -> None:
        """Attribute the bytes since the last hook to the innermost module."""
        before, self._bytes = self._bytes, allocated_bytes(self._device) or 0
        if self._open:
            self._held[self._names[self._open[-1]]] += self._bytes - before


def _describe_batch(batch: Any) -> list[dict[str, Any]]:
    return [
        {
            "path": path,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": str(tensor.device),
        }
        for path, tensor in tensor_leaves(batch)
    ]


@contextlib.contextmanager
def _saying(path: Callable[[], Path]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        warn(
            f"the report {path()} could not be written ({describe_error(error)}), and the run "
            "goes on without it; make room, or name another folder in OutOfMemoryReport(folder)",
            AutomicroWarning,
        )
