"""`diagnose`: a one-page report of why memory ran out, from the files of a failure.

Causes are ordered, likeliest first, each with the bytes that its remedies would free.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from automicro.tools import Remedy, table
from automicro.tools.doctor import holders as kinds
from automicro.tools.doctor.holders import STEP, Holder, find_holders, read_snapshot
from automicro.units import format_bytes, parse_bytes

GROWTH, SECOND_MODEL = "growth", "second model"
FRAGMENTATION, OTHERS = "fragmentation", "other processes"

_MODELS = (kinds.PARAMETERS, kinds.COPY)
_LEAST_SHARE = 0.08  # smallest share of the held bytes that counts as a cause
_MOST_REMEDIES = 3
# Unexpected memory weighs more than memory that every training needs.
_ENDLESS, _UNEXPECTED, _DOUBTFUL, _EXPECTED, _UNNAMED = 8.0, 4.0, 2.0, 1.0, 0.5


@dataclass(kw_only=True)
class Device:
    """The device at the failure; unknown values are None."""

    requested_bytes: int | None = None  # of the request that failed
    capacity_bytes: int | None = None  # the whole device, or the limit
    free_bytes: int | None = None  # not held by any process
    reserved_bytes: int | None = None  # by the allocator of this process
    allocated_bytes: int | None = None  # the part of it in tensors
    largest_free_bytes: int | None = None  # largest free block of the reserved memory
    is_expandable: bool = False  # whether segments can already grow

    @property
    def others_bytes(self) -> int:
        """Bytes of other processes, contexts and libraries; 0 if unknown."""
        if self.capacity_bytes is None or self.free_bytes is None or self.reserved_bytes is None:
            return 0
        return max(self.capacity_bytes - self.free_bytes - self.reserved_bytes, 0)

    @property
    def unallocated_bytes(self) -> int:
        """Bytes reserved but not in any tensor; 0 if unknown."""
        return max((self.reserved_bytes or 0) - (self.allocated_bytes or 0), 0)

    @property
    def is_fragmented(self) -> bool:
        """Whether the request would have fitted if the free blocks were contiguous."""
        asked, is_known = self.requested_bytes, self.allocated_bytes is not None
        return is_known and self.unallocated_bytes >= (asked or 0) > (self.largest_free_bytes or 0)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A reason why memory ran out."""

    kind: str  # a name of this module, or the kind of a holder
    text: str  # a sentence
    num_bytes: int
    remedies: Sequence[Remedy]
    weight: float  # bytes times a factor that is higher for unexpected memory


def _find_causes(holders: Sequence[Holder], device: Device) -> list[Cause]:
    """Return all possible causes, likeliest first."""
    # A log names no holders, and a history might start late, so allocated bytes count as held.
    held = max(sum(holder.num_bytes for holder in holders), device.allocated_bytes or 0, 1)
    causes = [*_of_growth(holders), *_of_models(holders)]
    causes += [_of_holder(each) for each in holders if each.kind not in _MODELS]
    causes = [cause for cause in causes if cause.num_bytes >= _LEAST_SHARE * held]
    # Causes of the device have their own thresholds.
    return sorted([*causes, *_of_device(device)], key=lambda cause: -cause.weight)


def _choose_remedies(
    causes: Sequence[Cause], holders: Sequence[Holder], *, can_halve: bool = True
) -> list[Remedy]:
    """Return the remedies of the likeliest cause, and those that free the most memory.

    >>> mlp = Holder(kind="activations", owner="Mlp", num_bytes=4096, count=2)
    >>> [(remedy.text, remedy.saved_bytes) for remedy in _choose_remedies([], [mlp])]
    [('halve the microbatch', 2048)]
    """
    moving, saved = (kinds.ACTIVATIONS, kinds.BACKWARD, kinds.STEP), attrgetter("saved_bytes")
    # Fewer rows do not stop growth from batch to batch.
    of_rows = sum(each.total_bytes - each.growth for each in holders if each.kind in moving)
    halving = Remedy(text="halve the microbatch", saved_bytes=of_rows // 2 * can_halve)
    others = [halving, *(remedy for cause in causes[1:] for remedy in cause.remedies)]
    ordered = [*(causes[0].remedies if causes else ()), *sorted(others, key=saved, reverse=True)]
    # Remedies of the likeliest cause are included even if they save little; bytes only decide the
    # order.
    found = list({each.text: each for each in ordered if each.saved_bytes > 0}.values())
    return sorted(found[:_MOST_REMEDIES], key=saved, reverse=True)


def _cause(
    kind: str, num_bytes: int, text: str, *remedies: tuple[str, int], weight: float = _EXPECTED
) -> Cause:
    found = [Remedy(text=text, saved_bytes=saved_bytes) for text, saved_bytes in remedies]
    weight *= num_bytes
    return Cause(kind=kind, text=text, num_bytes=num_bytes, remedies=found, weight=weight)


def _of_growth(holders: Sequence[Holder]) -> Iterator[Cause]:
    growing = sorted((each for each in holders if each.growth), key=lambda each: -each.growth)
    if growing:
        more, count = sum(each.growth for each in growing), len(growing[0].passes)
        who = "; ".join(
            f"{each.owner} {format_bytes(each.passes[1])} → {format_bytes(each.passes[-1])}"
            for each in growing[:3]
        )
        text = (
            f"memory grew from batch to batch, by {format_bytes(more)} between the second and "
            f"the last of {count} backward passes: {who}"
        )
        remedy = (
            "free the tensors of each batch: keep loss.item() or output.detach().cpu(), detach() "
            "a state that is carried over, leave out retain_graph, limit the length of lists"
        )
        yield _cause(GROWTH, more, text, (remedy, more), weight=_ENDLESS)


def _of_models(holders: Sequence[Holder]) -> Iterator[Cause]:
    # Most optimizers keep state of the same size as each parameter that they train, so a model
    # whose sizes do not occur in the state is not trained.
    state = {size for each in holders if each.kind == kinds.OPTIMIZER for size in each.sizes}
    models = [each for each in holders if each.kind in _MODELS]
    built = [each.sizes for each in models if each.kind == kinds.PARAMETERS]
    trained = [each for each in models if _share_of_bytes(each, state) >= 0.5]
    for model in models:
        kind, weight, what = SECOND_MODEL, _UNEXPECTED, "a second model"
        if model.kind == kinds.COPY:
            what = "a second model, a copy"
        elif trained and model not in trained:
            what = "a second model, for which the optimizer has no state"
        elif len(built) > 1 and (not trained or built.count(model.sizes) > 1):
            weight, what = _DOUBTFUL, f"one of {len(built)} models"
        else:
            kind, weight, what = kinds.PARAMETERS, _EXPECTED, "the model"
        has_line = ":" in model.owner  # a report has no lines
        name = f"the model of {model.owner}" if has_line else "the model"
        text = f"{what}{f', made at {model.owner},' * has_line} took {_amount(model)}"
        half = f"hold {name} in bfloat16", model.num_bytes // 2
        host = f"keep {name} on the host, or run it before training", model.num_bytes
        remedies = [half] if kind == kinds.PARAMETERS else [host, half]
        yield _cause(kind, model.num_bytes, text, *remedies, weight=weight)


def _share_of_bytes(model: Holder, sizes: set[int]) -> float:
    """Return the share of a model's bytes in tensors of these sizes."""
    in_sizes = sum(size * count for size, count in model.sizes.items() if size in sizes)
    return in_sizes / max(sum(size * count for size, count in model.sizes.items()), 1)


def _of_holder(holder: Holder) -> Cause:
    # Growth is a separate cause.
    usual, num_bytes = max(holder.passes, default=0), holder.total_bytes - holder.growth
    is_long = len(holder.passes) > 1 and num_bytes >= 3 * usual > 0
    said = [f"took {_amount(holder)}"] * bool(holder.num_bytes)
    said += [f"requested {format_bytes(holder.failed_bytes)} more"] * bool(holder.failed_bytes)
    said += [f"held at most {format_bytes(usual)} when earlier backward passes began"] * is_long
    weight = _UNNAMED if holder.kind == kinds.UNKNOWN else _DOUBTFUL if is_long else _EXPECTED
    text = f"{_named(holder)} {'; '.join(said)}"
    return _cause(holder.kind, num_bytes, text, *_remedies(holder, num_bytes), weight=weight)


def _remedies(holder: Holder, num_bytes: int) -> Iterator[tuple[str, int]]:
    owner, largest = holder.owner, max(holder.largest_bytes, holder.failed_bytes)
    if holder.kind == kinds.OPTIMIZER and owner.endswith(" (foreach)"):
        how = "foreach=False or fused=True, so that its step copies less"
        yield f"give {owner[:-10]} {how}", num_bytes
    elif holder.kind == kinds.OPTIMIZER:
        # A quarter of 32-bit state remains.
        yield "use an optimizer with 8-bit state, or Adafactor", holder.num_bytes * 3 // 4
    if holder.kind == kinds.ACTIVATIONS and holder.count > 1:
        how = "in the backward (torch.utils.checkpoint), or use torch.no_grad() if none follows"
        yield f"recompute {owner} {how}: its largest tensor stays", num_bytes - largest
    if holder.kind in (kinds.ACTIVATIONS, kinds.TENSORS) and largest >= 0.4 * num_bytes:
        how = "in chunks, or with a fused operation (scaled_dot_product_attention, a chunked loss)"
        yield f"compute {owner} {how}: an eighth of its largest tensor stays", largest * 7 // 8
    if holder.kind == kinds.TENSORS:
        yield f"keep tensors of {owner} on the host, and move what a batch needs", holder.num_bytes


def _of_device(device: Device) -> Iterator[Cause]:
    others, unused = device.others_bytes, device.unallocated_bytes
    if others > 0.1 * (device.capacity_bytes or 0):
        text = f"other processes, contexts and libraries held {format_bytes(others)}"
        end = "stop other processes on the device (nvidia-smi lists them), or use another device"
        yield _cause(OTHERS, others, text, (end, others), weight=_DOUBTFUL)
    if device.is_fragmented:
        largest = device.largest_free_bytes
        pieces = f" in pieces of at most {format_bytes(largest)}" if largest else ""
        text = (
            f"fragmentation: {format_bytes(unused)} were reserved but unallocated{pieces}, and "
            f"{format_bytes(device.requested_bytes or 0)} did not fit"
        )
        advice = "set PYTORCH_ALLOC_CONF=expandable_segments:True, which lets free pieces join"
        if device.is_expandable:
            advice = "use few sizes: pad to few lengths, and allocate long-lived tensors first"
        weight = _UNEXPECTED if unused >= 0.25 * (device.reserved_bytes or 0) else _EXPECTED
        yield _cause(FRAGMENTATION, unused, text, (advice, unused), weight=weight)


def _named(holder: Holder) -> str:
    whose = {kinds.GRADIENTS: "gradients of", kinds.OPTIMIZER: "the state of"}
    whose |= {kinds.UNKNOWN: "tensors", kinds.TENSORS: "tensors of"}
    caller = f", called at {holder.caller}," if holder.caller else ""
    return f"{whose.get(holder.kind, '')} {holder.owner}{caller}".strip()


def _amount(holder: Holder) -> str:
    tensors = f" in {holder.count} tensors, the largest {format_bytes(holder.largest_bytes)}"
    return format_bytes(holder.num_bytes) + tensors * (holder.count > 1)


_MOST_TEXT = 64 << 20  # bytes to read from the end of a log
_MOST_HOLDERS = 12  # in the report
_MESSAGE = re.compile(r"(?:CUDA|HIP|XPU|MPS backend|Simulated device) out of memory[^\n]*", re.I)
_AMOUNT = r"([\d.]+ ?(?:[KMGT]i?B|bytes?))"
_NO_HISTORY = "To find what grew, record a history with torch.cuda.memory._record_memory_history()."
_NO_SNAPSHOT = "Gradients, optimizer state and modules are counted even if not allocated yet."
_NO_OWNERS = "To find what held memory, give a snapshot of torch or a file of OutOfMemoryReport."


class UnreadableFailureError(ValueError):
    """A file that describes no failure: damaged, of another kind, or unsafe."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why memory ran out. ``print(diagnosis)`` shows the report.

    Attributes:
        source: name of the file.
        message: message of the error, or empty if the file has none.
        where: where training failed, if the file says so.
        device: state of the device.
        holders: memory by owner, largest first.
        causes: causes, likeliest first.
        remedies: at most three remedies, the one that frees the most memory first.
        remark: information missing from the file and how to record it, or empty.
    """

    source: str
    message: str
    where: str
    device: Device
    holders: Sequence[Holder]
    causes: Sequence[Cause]
    remedies: Sequence[Remedy]
    remark: str

    def __str__(self) -> str:
        begins = ["Likeliest cause", *["Also"] * len(self.causes)]
        causes = [f"{name}: {each.text}." for name, each in zip(begins, self.causes, strict=False)]
        lines = [*filter(None, (self.source, self.where, self.message)), ""]
        lines += causes or ["No cause shows."]
        remedies = [(each.saved_bytes, each.text) for each in self.remedies]
        held = [(each.num_bytes, f"{each.kind}: {each.owner}") for each in self.holders]
        lines += _table("What would help, by predicted bytes:", remedies)
        lines += _table("What took memory:", [each for each in held if each[0]][:_MOST_HOLDERS])
        figures = [
            f"{name.removesuffix('_bytes').replace('_', ' ')}: {format_bytes(amount)}"
            for name, amount in dataclasses.asdict(self.device).items()
            if name.endswith("_bytes") and amount is not None
        ]
        return "\n".join([*lines, "", *figures, "", self.remark]).rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return dataclasses.asdict(self)


def _table(title: str, rows: Sequence[tuple[int, str]]) -> list[str]:
    return ["", title, *table(rows)] if rows else []


def diagnose(path: str | os.PathLike[str], *, memory: str | int | None = None) -> Diagnosis:
    """Find out why memory ran out.

    Args:
        path: the file ``oom-NNNN.json`` of an `OutOfMemoryReport` (a snapshot next to it is read as
            well); a memory snapshot of any program (``torch.cuda.memory._dump_snapshot``); or text
            with the message of the error, such as a log.
        memory: memory of the device, if the file does not contain it: bytes, or text such as
            ``"24GiB"``.

    Raises:
        OSError: the file cannot be read.
        UnreadableFailureError: the file describes no failure, or is unsafe to read.

    Example:
        >>> import tempfile
        >>> log = Path(tempfile.mkdtemp()) / "train.log"
        >>> _ = log.write_text(
        ...     "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
        ...     "a total capacity of 24.00 GiB of which 1.00 GiB is free. Process 7 has 9.00 GiB "
        ...     "memory in use. Including non-PyTorch memory, this process has 14.00 GiB memory in "
        ...     "use. Of the allocated memory 13.00 GiB is allocated by PyTorch, and 500.00 MiB is "
        ...     "reserved by PyTorch but unallocated.")
        >>> diagnose(log).causes[0].text
        'other processes, contexts and libraries held 9.51 GiB'
    """
    source, capacity = Path(path), None if memory is None else parse_bytes(memory)
    try:
        report, device, holders, remark = _read(source, capacity)
        where, sizes = report.get("where"), report.get("microbatch_size", {})
        inside = "".join(f", inside {each}" for each in report.get("inside", [])[-1:])
        at = where and f"{where['phase']}, batch {where['batch']}, {sizes['before']} rows{inside}"
    except OSError:
        raise
    except Exception as error:  # damaged files raise many kinds of errors
        raise UnreadableFailureError(
            f"{source} cannot be diagnosed ({type(error).__name__}: {str(error)[:160]}): give a "
            "memory snapshot of torch, a report of OutOfMemoryReport, or a log with the error"
        ) from error
    causes = _find_causes(holders, device)
    return Diagnosis(
        source=source.name,
        message=str(report.get("message", "")),
        where=at or "",
        device=device,
        holders=holders,
        causes=causes,
        remedies=_choose_remedies(causes, holders, can_halve=sizes.get("before") != 1),
        remark=remark,
    )


_Read: TypeAlias = tuple[Mapping[str, Any], Device, Sequence[Holder], str]
"""A report, which may be empty, the device, the holders, and a note on what the file lacks."""


def _read(source: Path, capacity: int | None) -> _Read:
    with source.open("rb") as file:
        # Pickles of protocol 2 and above start with \x80, and reports with a brace.
        begin = file.read(512).lstrip()[:1]
        file.seek(max(file.seek(0, os.SEEK_END) - _MOST_TEXT, 0))
        text = "" if begin == b"\x80" else file.read().decode("utf-8", errors="replace")
    if begin == b"\x80":
        return _of_snapshot(source, {}, capacity)
    if begin == b"{":
        report, snapshot = json.loads(text), source.with_suffix(".pickle")
        if snapshot.exists():
            return _of_snapshot(snapshot, report, capacity)
        device = _device_of(report, capacity)
        return report, device, _holders_of(report, device), _NO_SNAPSHOT
    messages = _MESSAGE.findall(text)
    if not messages:
        raise ValueError("it contains no out-of-memory error")
    # The run might have continued after earlier failures.
    report = {"message": messages[-1]}
    return report, _device_of(report, capacity), [], _NO_OWNERS


def _of_snapshot(path: Path, report: Mapping[str, Any], capacity: int | None) -> _Read:
    snapshot, device = read_snapshot(path), _device_of(report, capacity)
    device.reserved_bytes, device.largest_free_bytes = snapshot.reserved, snapshot.largest_free
    device.allocated_bytes = sum(block.size for block in snapshot.blocks)
    device.is_expandable = snapshot.is_expandable
    if snapshot.failed is not None:
        # For entries of kind oom, the allocator stores the free bytes of the device there.
        device.requested_bytes, device.free_bytes = snapshot.failed.size, snapshot.failed.address
    return report, device, find_holders(snapshot), "" if snapshot.events else _NO_HISTORY


def _holders_of(report: Mapping[str, Any], device: Device) -> list[Holder]:
    """Return the holders in the report, and one for the remaining allocated bytes."""
    holders = [Holder(**each) for each in report["held"]]
    for each in holders:
        if each.owner in report.get("inside", [])[-1:]:
            each.failed_bytes = device.requested_bytes or 0
            each.num_bytes = max(each.num_bytes - each.failed_bytes, 0)  # request was refused
    allocated = device.allocated_bytes or report["peak_bytes"] or 0
    rest = max(allocated - sum(each.num_bytes for each in holders), 0)
    # In a first attempt, the module of the request is not known yet.
    asked = 0 if any(each.failed_bytes for each in holders) else device.requested_bytes or 0
    step = Holder(kind=STEP, owner="the rest of the step", num_bytes=rest, failed_bytes=asked)
    return sorted([*holders, *[step] * (rest + asked > 0)], key=lambda each: -each.num_bytes)


def _device_of(report: Mapping[str, Any], capacity: int | None) -> Device:
    """Return the device from torch's message, completed from the report."""

    def amount(pattern: str) -> int | None:
        found = re.search(pattern, str(report.get("message", "")))
        return None if found is None else parse_bytes(re.sub(r" ?bytes?$", " B", found[1]))

    known = report.get("device_memory") or {"total_bytes": report.get("limit_bytes")}
    allocated = amount(rf"(?:Of the allocated memory|Live tensors hold) {_AMOUNT}")
    unallocated = amount(rf"{_AMOUNT} is reserved by PyTorch but unallocated")
    both = None if allocated is None or unallocated is None else allocated + unallocated
    return Device(
        requested_bytes=amount(f"Tried to allocate {_AMOUNT}"),
        capacity_bytes=capacity or amount(f"capacity of {_AMOUNT}") or known["total_bytes"],
        free_bytes=amount(f"of which {_AMOUNT} is free") or known.get("free_bytes"),
        reserved_bytes=known.get("reserved_bytes") if both is None else both,
        allocated_bytes=allocated,
    )
