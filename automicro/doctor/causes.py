"""Why memory ran out, the likeliest first, and what would give how much of it back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from automicro.doctor.evidence import Holder
from automicro.doctor.origins import (
    ACTIVATIONS,
    BACKWARD,
    BATCH,
    COPY,
    EARLIER,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    TENSORS,
    keepers_near,
    line_of,
    told,
)
from automicro.units import format_bytes

_LEAST_SHARE = 0.08  # of what is held: less is no cause
_LEAST_FRAGMENTED = 0.15  # of what is reserved
_MOSTLY = 0.4  # of it: more than a large request leaves free by itself
# What should not be there weighs more than what every training has.
_UNEXPECTED, _DOUBTFUL, _EXPECTED, _UNKNOWN = 4.0, 2.0, 1.0, 0.5


@dataclass(kw_only=True)
class Device:
    """What is known of the device when memory ran out; None for what is not.

    Attributes:
        capacity_bytes: all of it, or the limit.
        free_bytes: that nobody had.
        reserved_bytes: that this process's allocator had.
        allocated_bytes: that tensors held.
        largest_free_bytes: the largest piece of what was reserved and not held.
        requested_bytes: that could not be had.
        others_bytes: that others had: processes, libraries, contexts.
        others: who they are, in words.
        is_expandable: whether segments already grow.
    """

    capacity_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None
    largest_free_bytes: int | None = None
    requested_bytes: int | None = None
    others_bytes: int | None = None
    others: Sequence[str] = ()
    is_expandable: bool = False

    @property
    def unused_bytes(self) -> int | None:
        """Reserved and held by nobody."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return max(self.reserved_bytes - self.allocated_bytes, 0)

    @property
    def is_fragmented(self) -> bool:
        """Whether what is asked for would have fitted, had the free pieces been one.

        It is not where little of what is reserved is free: then the device is full, and its last
        bytes lie in pieces as they always do.
        """
        unused, asked = self.unused_bytes, self.requested_bytes
        if not unused or not self.reserved_bytes or asked is None:
            return False
        fits = self.largest_free_bytes is not None and self.largest_free_bytes >= asked
        return unused >= asked and unused >= _LEAST_FRAGMENTED * self.reserved_bytes and not fits


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """What can be done.

    Attributes:
        text: what, in a sentence.
        saved_bytes: how much less would be held, as predicted.
    """

    text: str
    saved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why memory ran out.

    Attributes:
        kind: ``"kept"``, ``"grows"``, ``"copy"``, ``"second model"``, ``"fragmentation"``,
            ``"others"``, or one of the kinds of a holder.
        owner: whose: a module's class, a line, an optimizer.
        where: the line, as file, line and function; empty where there is none.
        num_bytes: of it.
        text: in a sentence or two.
        remedies: against it.
        weight: its bytes, times how little it should be there.
    """

    kind: str
    owner: str
    where: str = ""
    num_bytes: int
    text: str
    remedies: Sequence[Remedy] = field(default=(), repr=False)
    weight: float = 0.0


def find_causes(holders: Sequence[Holder], device: Device) -> list[Cause]:
    """All that may be a cause, the likeliest first.

    Args:
        holders: of memory.
        device: that ran out of it.
    """
    held = max(sum(holder.num_bytes for holder in holders), device.allocated_bytes or 0, 1)
    causes = [cause for holder in holders for cause in _of_holder(holder, holders, held)]
    kept = _kept_graph(holders, held)
    causes += [] if kept is None else [kept]
    causes += _of_device(device)
    return sorted(causes, key=lambda cause: -cause.weight)


def choose_remedies(
    causes: Sequence[Cause], holders: Sequence[Holder] = (), count: int = 3
) -> list[Remedy]:
    """The remedies that give most back: of all causes, and those that help in any case.

    >>> mlp = Holder(kind="activations", owner="Mlp", num_bytes=4096, largest_bytes=4096)
    >>> [(remedy.text[:20], remedy.saved_bytes) for remedy in choose_remedies([], [mlp])]
    [('halve the microbatch', 2048)]
    """
    found = {remedy.text: remedy for cause in causes for remedy in cause.remedies}
    for remedy in _of_any_training(holders):
        found.setdefault(remedy.text, remedy)
    useful = [remedy for remedy in found.values() if remedy.saved_bytes > 0]
    return sorted(useful, key=lambda remedy: -remedy.saved_bytes)[:count]


def _of_holder(holder: Holder, holders: Sequence[Holder], held: int) -> list[Cause]:
    total = holder.num_bytes + holder.failed_bytes
    if total < _LEAST_SHARE * held:
        return []
    if holder.grew is not None and holder.kept_rounds <= 1:
        return [_growing(holder, total)]
    is_kept = holder.kept_bytes >= 0.5 * total and holder.kept_rounds >= 2
    if is_kept and holder.kind in (TENSORS, BATCH):
        return [_kept(holder)]
    if holder.kind == COPY:
        return [_copied(holder)]
    if holder.kind == PARAMETERS:
        return [_model(holder, holders)]
    total -= holder.kept_bytes  # of which is said what keeps it
    if total < _LEAST_SHARE * held:
        return []
    makers = {
        OPTIMIZER: _optimizer, GRADIENTS: _gradients, ACTIVATIONS: _activations, EARLIER: _earlier,
        BACKWARD: _backward,
    }  # fmt: skip
    return [makers.get(holder.kind, _tensors)(holder, total)]


def _of_any_training(holders: Sequence[Holder]) -> list[Remedy]:
    """What helps whatever the cause: less of this step, and less that stays."""
    moving = [holder for holder in holders if holder.kind in (ACTIVATIONS, BACKWARD)]
    rows = sum(each.num_bytes + each.failed_bytes - each.kept_bytes for each in moving)
    remedies = [
        Remedy(text="halve the microbatch (half of what its rows take)", saved_bytes=rows // 2)
    ]
    remedies += [_recompute(holder) for holder in moving if holder.kind == ACTIVATIONS]
    remedies += [remedy for each in holders if each.kind == OPTIMIZER for remedy in _shrink(each)]
    return remedies


def _recompute(holder: Holder) -> Remedy:
    largest = max(holder.largest_bytes, holder.failed_bytes)
    rest = holder.num_bytes + holder.failed_bytes - holder.kept_bytes - largest
    return Remedy(
        text=f"recompute {holder.owner} in the backward (torch.utils.checkpoint): all but its "
        "largest tensor",
        saved_bytes=max(rest, 0),
    )


def _shrink(holder: Holder) -> list[Remedy]:
    total = holder.num_bytes + holder.failed_bytes
    return [
        Remedy(
            text="take an optimizer with state of 8 bits (a quarter of it), or without, such as "
            "Adafactor",
            saved_bytes=total * 3 // 4,
        ),
        Remedy(text="shard its state over 2 ranks (half of it)", saved_bytes=total // 2),
    ]


def _kept_graph(holders: Sequence[Holder], held: int) -> Cause | None:
    """What is left of earlier rounds, taken together: graphs are kept as a whole."""
    kept = [holder for holder in holders if holder.kept_bytes]
    num_bytes = sum(holder.kept_bytes for holder in kept)
    rounds = max((holder.kept_rounds for holder in kept), default=0)
    if num_bytes < _LEAST_SHARE * held or rounds < 1:
        return None
    largest = max(kept, key=lambda holder: holder.kept_bytes)
    if largest.kind in (TENSORS, BATCH) and largest.kept_bytes > 0.7 * num_bytes:
        return None  # said of its line
    caller = largest.caller or next((each.caller for each in kept if each.caller), None)
    if largest.kind == BACKWARD or caller is None:
        caller = next((each.caller for each in holders if each.kind == ACTIVATIONS), caller)
    whose = ", ".join(each.owner for each in sorted(kept, key=lambda each: -each.kept_bytes)[:3])
    lines = [] if caller is None else keepers_near(caller)
    suspects = "; ".join(f"line {line}: {text}" for line, text in lines[:3])
    if largest.kind == BACKWARD:
        what = "something keeps gradients, or other results of the backward"
        remedy = "keep norms of earlier gradients, or copies on the host (.cpu()), and not all"
    elif largest.kept_count <= 2 * rounds and largest.kept_bytes > 0.7 * num_bytes:
        what = "something collects outputs"
        remedy = "keep what is needed of earlier outputs, on the host: output.detach().cpu()"
    else:
        what = (
            "something keeps a result together with its graph, such as a list that losses or "
            "outputs are appended to, a sum of losses, or retain_graph=True"
        )
        remedy = "keep loss.item() or output.detach() of earlier rounds, not the graph with it"
    asked = f" Lines nearby that may hold them: {suspects}." if suspects else ""
    return Cause(
        kind="kept",
        owner=told(caller),
        where=told(caller),
        num_bytes=num_bytes,
        text=(
            f"{format_bytes(num_bytes)} are left from {rounds} earlier round"
            f"{'s' if rounds > 1 else ''} of the loop at {told(caller)} (tensors of {whose}): "
            f"{what}.{asked}"
        ),
        remedies=[Remedy(text=remedy, saved_bytes=num_bytes)],
        weight=num_bytes * (_UNEXPECTED if rounds > 1 else _DOUBTFUL),
    )


def _kept(holder: Holder) -> Cause:
    return Cause(
        kind="kept",
        owner=holder.owner,
        where=told(holder.where),
        num_bytes=holder.kept_bytes,
        text=(
            f"{format_bytes(holder.kept_bytes)} of {holder.count} tensors made at "
            f"{_quoted(holder)} are left from {holder.kept_rounds} earlier rounds: something "
            f"collects them"
        ),
        remedies=[
            Remedy(
                text=f"let go of what {told(holder.where)} makes, or move it to the host (.cpu()) "
                "before it is collected",
                saved_bytes=holder.kept_bytes,
            )
        ],
        weight=holder.kept_bytes * _UNEXPECTED,
    )


def _growing(holder: Holder, total: int) -> Cause:
    assert holder.grew is not None
    first, last = holder.grew
    return Cause(
        kind="grows",
        owner=holder.owner,
        where=told(holder.where),
        num_bytes=total,
        text=(
            f"what {_quoted(holder)} makes grows from round to round, from {format_bytes(first)} "
            f"to {format_bytes(last)}; {format_bytes(total)} of it are held or were asked for"
        ),
        remedies=[
            Remedy(
                text=f"bound what {told(holder.where)} joins: a window, a fixed buffer, or fewer "
                "entries (half of it)",
                saved_bytes=total // 2,
            )
        ],
        weight=total * _UNEXPECTED,
    )


def _copied(holder: Holder) -> Cause:
    return Cause(
        kind="copy",
        owner=holder.owner,
        where=told(holder.where),
        num_bytes=holder.num_bytes,
        text=(
            f"a copy of a model or its weights, made at {_quoted(holder)}, holds "
            f"{format_bytes(holder.num_bytes)} in {holder.count} tensors"
        ),
        remedies=[
            Remedy(
                text=f"keep the copy of {told(holder.where)} on the host, and move it only for "
                "evaluations",
                saved_bytes=holder.num_bytes,
            )
        ],
        weight=holder.num_bytes * _UNEXPECTED,
    )


def _model(holder: Holder, holders: Sequence[Holder]) -> Cause:
    models = [each for each in holders if each.kind == PARAMETERS]
    is_second = len(models) > 1 and holder.is_trained is False
    largest = max(models, key=lambda each: each.num_bytes) is holder
    doubtful = len(models) > 1 and largest and holder.is_trained is None
    what = "a second model, which is not trained," if is_second else "a model"
    remedies = [
        Remedy(
            text=f"hold the model of {told(holder.where)} in bfloat16 (half of it)",
            saved_bytes=holder.num_bytes // 2,
        )
    ]
    if is_second:
        remedies.insert(
            0,
            Remedy(
                text=f"hold the model of {told(holder.where)} on the host, or compute its outputs "
                "once before training",
                saved_bytes=holder.num_bytes,
            ),
        )
    return Cause(
        kind="second model" if is_second else PARAMETERS,
        owner=holder.owner,
        where=told(holder.where),
        num_bytes=holder.num_bytes,
        text=(
            f"{what} made at {_quoted(holder)} holds {format_bytes(holder.num_bytes)} in "
            f"{holder.count} parameters and buffers"
        ),
        remedies=remedies,
        weight=holder.num_bytes * (_DOUBTFUL if is_second or doubtful else _EXPECTED),
    )


def _optimizer(holder: Holder, total: int) -> Cause:
    return Cause(
        kind=OPTIMIZER,
        owner=holder.owner,
        where=told(holder.caller),
        num_bytes=total,
        text=(
            f"the optimizer ({holder.owner}) holds {format_bytes(holder.num_bytes)} in "
            f"{holder.count} tensors of state"
            + (f", and asked for {format_bytes(holder.failed_bytes)}" * bool(holder.failed_bytes))
        ),
        remedies=_shrink(holder),
        weight=total * _EXPECTED,
    )


def _gradients(holder: Holder, total: int) -> Cause:
    return Cause(
        kind=GRADIENTS,
        owner=holder.owner,
        num_bytes=total,
        text=f"gradients hold {format_bytes(holder.num_bytes)} in {holder.count} tensors",
        remedies=[
            Remedy(
                text="let go of gradients before the next forward: "
                "optimizer.zero_grad(set_to_none=True)",
                saved_bytes=holder.num_bytes,
            )
        ],
        weight=total * _EXPECTED,
    )


def _activations(holder: Holder, total: int) -> Cause:
    is_long = holder.usual_bytes is not None and max(
        holder.largest_bytes, holder.failed_bytes
    ) >= 3 * max(holder.usual_bytes, 1)
    text = (
        f"{holder.owner} holds {format_bytes(holder.num_bytes)} of activations in {holder.count} "
        f"tensor{'s' if holder.count != 1 else ''}, most of it from {_quoted(holder)}"
    )
    if holder.failed_bytes:
        text += f"; the {format_bytes(holder.failed_bytes)} that could not be had were for it, too"
    if is_long:
        usual = format_bytes(holder.usual_bytes or 0)
        text += (
            f". In earlier batches its largest tensor had {usual}: this batch is larger or longer"
        )
    largest = max(holder.largest_bytes, holder.failed_bytes)
    remedies = []
    if holder.count > 1:
        remedies.append(_recompute(holder))
    if largest >= 0.4 * total:
        remedies.append(
            Remedy(
                text=f"compute {told(holder.where)} in pieces, or by a fused operation that does "
                "not keep the whole (scaled_dot_product_attention, a chunked loss): an eighth of "
                "its largest tensor stays",
                saved_bytes=largest * 7 // 8,
            )
        )
    return Cause(
        kind=ACTIVATIONS,
        owner=holder.owner,
        where=told(holder.where),
        num_bytes=total,
        text=text,
        remedies=remedies,
        weight=total * (_DOUBTFUL if is_long else _EXPECTED),
    )


def _backward(holder: Holder, total: int) -> Cause:
    return Cause(
        kind=BACKWARD,
        owner=holder.owner,
        num_bytes=total,
        text=f"the backward holds {format_bytes(holder.num_bytes)} in {holder.count} tensors",
        weight=total * _EXPECTED,
    )


def _tensors(holder: Holder, total: int) -> Cause:
    what = "the batch" if holder.kind == BATCH else "tensors"
    where = _quoted(holder) if holder.where else holder.owner
    return Cause(
        kind=holder.kind,
        owner=holder.owner,
        where=told(holder.where),
        num_bytes=total,
        text=(
            f"{what} of {where} hold{'s' if holder.kind == BATCH else ''} "
            f"{format_bytes(holder.num_bytes)} in {holder.count} pieces"
        ),
        remedies=[
            Remedy(
                text=f"let go of what {where} makes before more is made",
                saved_bytes=holder.num_bytes,
            )
        ],
        weight=total * _EXPECTED,
    )


def _earlier(holder: Holder, total: int) -> Cause:
    return Cause(
        kind=EARLIER,
        owner=holder.owner,
        num_bytes=total,
        text=(
            f"{format_bytes(holder.num_bytes)} in {holder.count} tensors were made before the "
            f"recording began, or without it: call torch.cuda.memory._record_memory_history() "
            f"before the model is made, and they get names"
        ),
        weight=total * _UNKNOWN,
    )


def _of_device(device: Device) -> list[Cause]:
    causes = []
    others = device.others_bytes or 0
    if others > 0 and others >= 0.1 * (device.capacity_bytes or others):
        who = f" ({'; '.join(device.others)})" if device.others else ""
        causes.append(
            Cause(
                kind="others",
                owner="others on the device",
                num_bytes=others,
                text=f"others on the device hold {format_bytes(others)}{who}",
                remedies=[
                    Remedy(
                        text="end what else runs on the device (nvidia-smi lists it), or take "
                        "another device",
                        saved_bytes=others,
                    )
                ],
                weight=others * _DOUBTFUL,
            )
        )
    if device.is_fragmented:
        unused = device.unused_bytes or 0
        is_most = unused >= _MOSTLY * (device.reserved_bytes or 0)
        advice = (
            "hold sizes alike: pad batches to few lengths, or free what is large before what is "
            "small is made"
            if device.is_expandable
            else "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, so that free pieces make "
            "one"
        )
        causes.append(
            Cause(
                kind="fragmentation",
                owner="fragmentation",
                num_bytes=unused,
                text=(
                    f"{format_bytes(unused)} are reserved and held by nobody, in pieces of at most "
                    f"{format_bytes(device.largest_free_bytes or 0)}, so that "
                    f"{format_bytes(device.requested_bytes or 0)} did not fit: memory is fragmented"
                ),
                remedies=[Remedy(text=advice, saved_bytes=unused)],
                weight=unused * (_UNEXPECTED if is_most else _EXPECTED),
            )
        )
    return causes


def _quoted(holder: Holder) -> str:
    source = "" if holder.where is None else line_of(holder.where)
    return told(holder.where) + (f" `{source[:80]}`" if source else "")
