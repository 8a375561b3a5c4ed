"""Reports of out-of-memory errors, one JSON file each."""

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from automicro.batch.tensors import tensor_leaves
from automicro.errors import AutomicroWarning, describe_error, removed, warn
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.files import write_whole
from automicro.memory.device import OccupiedDevice, allocated_bytes
from automicro.memory.residents import measure
from automicro.options import read_count
from automicro.step.events import Microbatch, OutOfMemory, Resize
from automicro.step.feature import Attempt
from automicro.torch_private_execution import (
    can_record_memory,
    dump_memory_snapshot,
    is_compiled,
    tell_no_more,
    tell_of_shortage,
)

logger = logging.getLogger(__name__)


@removed(history="Call torch.cuda.memory._record_memory_history() before training")
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
        max_reports: maximum number of reports in the folder, those of earlier runs included.
        snapshot: whether to save snapshots, if available. After
            ``torch.cuda.memory._record_memory_history()`` they show what was allocated where.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> report = OutOfMemoryReport("runs/1/oom", max_reports=5)
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, max_reports: int = 20, snapshot: bool = True
    ) -> None:
        self._folder = Path(folder)
        self._max_reports = read_count("max_reports", max_reports)
        self._snapshot = snapshot
        self._left = self._max_reports - len(list(self._folder.glob("oom-*.json")))
        self._said_full = False
        self._batch: Any = None
        self._taken: Path | None = None  # snapshot of this attempt's last refused request
        self._why_not: Exception | None = None
        self._forward: _Forward | None = None  # in an attempt after a failed one
        self._last: tuple[Path, dict[str, Any]] | None = None  # report of the failed attempt

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

    def forward_end(self, run: Run, microbatch: Microbatch) -> None:
        """Stop measuring."""
        if self._forward is not None:
            self._forward.end()

    def attempt_end(self, run: Run, attempt: Attempt) -> None:
        """Cancel the snapshot, and drop one from which a library recovered by itself."""
        tell_no_more(self._take_snapshot)
        self._drop_snapshot()
        # The report is rewritten, because modules were not measured in the attempt that it
        # describes.
        self._rewrite(self._forward)
        self._forward = self._last = None

    def oom(self, run: Run, failure: OutOfMemory) -> None:
        """Write a report. `resize` adds the next size later, if there is one."""
        tell_no_more(self._take_snapshot)
        forward, self._forward, self._last = self._forward, None, None
        if forward is not None:
            forward.end()
        try:
            if self._left > 0:
                self._report(run, failure, forward)
            elif not self._said_full:
                self._said_full = True
                logger.warning(
                    "%s has %d reports, so this failure and later ones get none. Raise "
                    "max_reports, or name another folder",
                    self._folder,
                    self._max_reports,
                )
        # Also after Ctrl-C, so that no snapshot is left behind.
        finally:
            self._drop_snapshot()

    def _report(self, run: Run, failure: OutOfMemory, forward: "_Forward | None") -> None:
        with _saying(self._folder):
            path = self._next_path()
            with _saying(path):
                report = describe_failure(run, failure, self._batch)
                if forward is not None:
                    forward.add_to(report)
                    report["inside"] = forward.inside
                _write(path, report)
                self._last = path, report
                failure.reports.append(str(path))
                picture = path.with_suffix(".pickle")
                with _saying(picture):
                    if self._takes_snapshots(run):
                        self._keep_snapshot(picture)
                self._left -= 1

    def resize(self, run: Run, resize: Resize) -> None:
        """Add the next size to the report."""
        if self._last is not None:
            self._last[1]["microbatch_size"]["after"] = resize.after
            self._rewrite()

    def _rewrite(self, forward: "_Forward | None" = None) -> None:
        if self._last is not None:
            path, report = self._last
            with _saying(path):
                if forward is not None:
                    forward.add_to(report)
                _write(path, report)

    def _keep_snapshot(self, path: Path) -> None:
        if self._why_not is not None:
            raise self._why_not
        if self._taken is None:
            dump_memory_snapshot(str(path))
        else:
            self._taken.replace(path)

    def _takes_snapshots(self, run: Run) -> bool:
        return self._snapshot and self._left > 0 and can_record_memory(run.device)

    def _take_snapshot(self) -> None:
        """Take a snapshot. Called by the allocator, which an exception must not reach."""
        self._drop_snapshot()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # The name has the process id, because several processes might share a folder.
            self._taken = self._folder / f"snapshot-{os.getpid()}.part"
            dump_memory_snapshot(str(self._taken))
        except Exception as error:  # reported when the report is written
            self._why_not = error

    def _drop_snapshot(self) -> None:
        self._why_not = None
        if self._taken is not None:
            with contextlib.suppress(OSError):  # the disk might be read-only
                self._taken.unlink(missing_ok=True)
            self._taken = None

    def _next_path(self) -> Path:
        number = self._max_reports - self._left + 1
        while (path := self._folder / f"oom-{number:04d}.json").exists():
            number += 1  # some were removed
        return path


def _write(path: Path, report: Mapping[str, Any]) -> None:
    text = f"{json.dumps(report, indent=2)}\n".encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write(text))


_WHERE = ("epoch", "epoch_batch", "batch", "samples", "tokens")


def describe_failure(run: Run, failure: OutOfMemory, batch: Any) -> dict[str, Any]:
    """Describe an out-of-memory failure as plain values for JSON."""
    attempt, state = failure.attempt, run.state
    occupied = OccupiedDevice(run.device, run.modules, run.optimizer)
    residents = measure(occupied, training=attempt.phase == "train")
    sizes = [
        each.nbytes for module in run.modules for each in (*module.parameters(), *module.buffers())
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
            **{name: getattr(state, name) for name in _WHERE},
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
    found = {"total": total_bytes, "free": free_bytes, "reserved": reserved_bytes}
    return {f"{name}_bytes": int(number) for name, number in found.items()}


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
        self._open: list[int] = []  # ids of modules that are running
        self._bytes = 0  # allocated at the last hook
        self._held: Counter[str] = Counter()
        self._handles: list[Any] = []
        # A hook would break the graph of a compiled model, or cause a recompilation.
        is_plain = not any(map(is_compiled, run.model.modules()))
        if is_plain and allocated_bytes(self._device) is not None:
            self._handles.append(register_module_forward_pre_hook(self._enter))
            self._handles.append(register_module_forward_hook(self._leave))

    @property
    def inside(self) -> list[str]:
        """Modules in which the forward failed, outermost first; empty if it succeeded."""
        return [self._names[module] for module in self._open]

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
def _saying(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        warn(
            f"the report {path} could not be written ({describe_error(error)}), and the run "
            "continues without it. Free space, or name another folder in OutOfMemoryReport(folder)",
            AutomicroWarning,
        )
