"""Why memory ran out, the likeliest first, and what would give how much of it back."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from automicro.tools.doctor.evidence import Holder
from automicro.tools.doctor.keepers import (
    CACHES,
    CARRIES,
    CATCHES,
    COLLECTS,
    HANDS_ON,
    RETAINS,
    SETS,
    SUMS,
    Keeper,
    find_keepers,
)
from automicro.tools.doctor.origins import (
    ACTIVATIONS,
    BACKWARD,
    COPY,
    EARLIER,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    TENSORS,
    is_outside,
    told,
)
from automicro.tools.doctor.snapshot import Frame
from automicro.tools.doctor.source import call_of, line_of, name_given, runs_without_grad
from automicro.units import format_bytes

_LEAST_SHARE = 0.08  # of what is held: less is no cause
_LEAST_FRAGMENTED = 0.15  # of what is reserved
_MOSTLY = 0.4  # of it: more than a large request leaves free by itself
_MOST_REMEDIES = 3
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
    causes += _growing(holders, held) + _kept(holders, held) + _of_device(device)
    return sorted(causes, key=lambda cause: -cause.weight)


def choose_remedies(causes: Sequence[Cause], holders: Sequence[Holder]) -> list[Remedy]:
    """The likeliest cause's remedies, then those that give most back of all others.

    >>> mlp = Holder(kind="activations", owner="Mlp", num_bytes=4096, largest_bytes=4096)
    >>> [(remedy.text[:20], remedy.saved_bytes) for remedy in choose_remedies([], [mlp])]
    [('halve the microbatch', 2048)]
    """
    likeliest = [remedy for cause in causes[:1] for remedy in cause.remedies]
    others = [remedy for cause in causes[1:] for remedy in cause.remedies]
    found: dict[str, Remedy] = {}
    for several in (likeliest, [*others, *_of_any_training(holders)]):
        for remedy in sorted(several, key=lambda each: -each.saved_bytes):
            if remedy.saved_bytes > 0 and len(found) < _MOST_REMEDIES:
                found.setdefault(remedy.text, remedy)
    return sorted(found.values(), key=lambda each: -each.saved_bytes)


def _of_holder(holder: Holder, holders: Sequence[Holder], held: int) -> list[Cause]:
    total = holder.num_bytes + holder.failed_bytes
    if total < _LEAST_SHARE * held or _is_growing(holder):
        return []
    if holder.kind == COPY:
        return [_copied(holder)]
    if holder.kind == PARAMETERS:
        return [_model(holder, holders)]
    total -= holder.kept_bytes  # of which is said what keeps it
    if total < _LEAST_SHARE * held:
        return []
    if holder.kind == GRADIENTS:
        return [_gradients(holder, holders)]
    makers = {OPTIMIZER: _optimizer, EARLIER: _earlier, BACKWARD: _backward}
    if holder.kind in makers:
        return [makers[holder.kind](holder, total)]
    if holder.is_once and holder.kind != ACTIVATIONS:
        return [_made_once(holder, total)]
    return [_computed(holder, holders, total)]


def _of_any_training(holders: Sequence[Holder]) -> list[Remedy]:
    """What helps whatever the cause: less of this step, and less that stays."""
    moving = [holder for holder in holders if holder.kind in (ACTIVATIONS, BACKWARD)]
    rows = sum(each.num_bytes + each.failed_bytes - each.kept_bytes for each in moving)
    remedies = [
        Remedy(text="halve the microbatch (half of what its rows take)", saved_bytes=rows // 2)
    ]
    remedies += [remedy for holder in moving for remedy in _recompute(holder)]
    remedies += [remedy for each in holders if each.kind == OPTIMIZER for remedy in _shrink(each)]
    return remedies


def _recompute(holder: Holder) -> list[Remedy]:
    """Only where a backward comes, and of a module that keeps several tensors for it."""
    if holder.kind != ACTIVATIONS or holder.is_followed is False or holder.is_without_grad:
        return []
    largest = max(holder.largest_bytes, holder.failed_bytes)
    rest = holder.num_bytes + holder.failed_bytes - holder.kept_bytes - largest
    text = f"recompute {holder.owner} in the backward (torch.utils.checkpoint): all but its largest"
    return [Remedy(text=f"{text} tensor", saved_bytes=max(rest, 0))]


def _shrink(holder: Holder) -> list[Remedy]:
    state = holder.num_bytes + holder.failed_bytes
    if holder.owner == "lbfgs":
        fewer = "let LBFGS remember fewer steps: history_size=10 (a tenth of 100)"
        return [Remedy(text=fewer, saved_bytes=state * 9 // 10)]
    remedies = []
    if holder.temporary_bytes:
        state -= holder.temporary_bytes + holder.failed_bytes
        remedies.append(
            Remedy(
                text=f"take {holder.owner} with foreach=False or fused=True: it steps without "
                "copies of all parameters",
                saved_bytes=holder.temporary_bytes + holder.failed_bytes,
            )
        )
    return [
        *remedies,
        Remedy(
            text="take an optimizer with state of 8 bits (a quarter of it), or without, such as "
            "Adafactor",
            saved_bytes=state * 3 // 4,
        ),
        Remedy(text="shard its state over 2 ranks (half of it)", saved_bytes=state // 2),
    ]


_KEEPING = {
    COLLECTS: "collects them",
    SUMS: "adds them up with their graphs",
    CATCHES: "keeps an exception, whose traceback holds the tensors of its functions",
    CACHES: "caches them",
    RETAINS: "keeps the graph",
    CARRIES: "carries a state with its graph into the next round",
    HANDS_ON: "may keep them",
    SETS: "may keep them",
}
_LETTING_GO = {
    SUMS: "add up loss.item() at {}; if the sum is trained with, call backward() for each part at "
    "once, and gradients add up",
    CATCHES: "keep str(error) at {}, not the exception with its traceback",
    CACHES: "bound the cache at {} (maxsize), or compute anew",
    RETAINS: "do without the graph at {} (retain_graph, create_graph), and detach() what the next "
    "round begins with",
    CARRIES: "detach() what {} carries into the next round: h = h.detach()",
}


def _kept(holders: Sequence[Holder], held: int) -> list[Cause]:
    """What is left of earlier rounds, taken together: graphs are kept as a whole."""
    kept = [each for each in holders if each.kept_bytes and not _is_growing(each)]
    kept.sort(key=lambda each: -each.kept_bytes)
    num_bytes = sum(each.kept_bytes for each in kept)
    rounds = max((each.kept_rounds for each in kept), default=0)
    if num_bytes < _LEAST_SHARE * held or rounds < 1:
        return []
    largest = kept[0]
    is_one = largest.kept_line_bytes > 0.7 * num_bytes
    is_gradient = largest.kind == BACKWARD
    chain = largest.kept_chain
    loop = largest.kept_loop or (chain[-1] if chain else largest.where)
    keepers = find_keepers(chain, loop=loop, gradients=is_gradient, graphs=not is_one)[:3]
    whose = [each.owner for each in kept[:3] if each.kept_bytes >= 0.1 * num_bytes]
    text = (
        f"{format_bytes(num_bytes)} are left from {rounds} earlier round{'s' * (rounds > 1)} of "
        f"the loop at {told(loop)} (made by {', '.join(whose)})"
    )
    text += "".join(
        f"{'. Or' if number else ':'} {_said(keeper.frame)} {_KEEPING[keeper.how]}"
        for number, keeper in enumerate(keepers)
    )
    if not keepers:
        text += ": something collects them, or keeps a result, perhaps together with its graph"
    where = keepers[0].frame if keepers else largest.where
    return [
        Cause(
            kind="kept",
            owner=told(where),
            where=told(where),
            num_bytes=num_bytes,
            text=text,
            remedies=[
                *([_no_grad(largest, num_bytes)] if _is_for_nothing(largest) else []),
                Remedy(
                    text=_let_go(keepers[0] if keepers else None, largest, is_one),
                    saved_bytes=num_bytes,
                ),
            ],
            weight=num_bytes * (_UNEXPECTED if rounds > 1 else _DOUBTFUL),
        )
    ]


def _let_go(keeper: Keeper | None, kept: Holder, is_one: bool) -> str:
    place = told(kept.where if keeper is None else keeper.frame)
    if kept.kind == BACKWARD and (keeper is None or keeper.how == COLLECTS):
        return f"keep norms of earlier gradients at {place}, or copies on the host (.cpu())"
    if keeper is not None and keeper.how in _LETTING_GO:
        return _LETTING_GO[keeper.how].format(place)
    if is_one or (keeper is not None and not keeper.has_graph):
        return (
            f"keep less at {place}: what is needed of it, the last few, or copies on the host "
            "(.detach().cpu())"
        )
    return f"keep loss.item() or output.detach() at {place}, not the graph that may come with it"


def _is_for_nothing(holder: Holder) -> bool:
    """Whether a forward keeps a graph that nothing will go back through."""
    is_forward = holder.kind == ACTIVATIONS and holder.is_followed is False
    return is_forward and not holder.is_without_grad


def _no_grad(holder: Holder, saved_bytes: int) -> Remedy:
    return Remedy(
        text=f"no backward ever follows {_forward_of(holder)}: run it under torch.no_grad()",
        saved_bytes=saved_bytes,
    )


def _forward_of(holder: Holder) -> str:
    chain = holder.chain or holder.kept_chain
    caller = next((each for each in chain if is_outside(each)), None)
    return f"the forward at {told(caller or holder.where)}"


def _is_growing(holder: Holder) -> bool:
    return holder.grew is not None and holder.kept_rounds <= 1


def _growing(holders: Sequence[Holder], held: int) -> list[Cause]:
    """What each round makes larger, taken together: of what grows, more grows."""
    growing = [each for each in holders if _is_growing(each)]
    total = sum(each.num_bytes + each.failed_bytes for each in growing)
    if total < _LEAST_SHARE * held:
        return []
    joining = [each for each in growing if each.grown_by == each.where]
    largest = max(joining or growing, key=lambda each: each.num_bytes + each.failed_bytes)
    where = largest.grown_by or largest.where
    assert largest.grew is not None
    first, last = map(format_bytes, largest.grew)
    return [
        Cause(
            kind="grows",
            owner=largest.owner,
            where=told(where),
            num_bytes=total,
            text=(
                f"what {_said(where)} makes grows from round to round, the largest tensor from "
                f"{first} to {last}; {format_bytes(total)} of what grows are held or were asked for"
            ),
            remedies=[
                Remedy(
                    text=f"bound what {told(where)} makes: a window, a fixed buffer, or fewer "
                    "entries (half of it)",
                    saved_bytes=total // 2,
                )
            ],
            weight=total * (_DOUBTFUL if largest.grown_by is None else _UNEXPECTED),
        )
    ]


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
    what = "a second model, or data, which is not trained," if is_second else "a model"
    text = (
        f"{what} made at {_quoted(holder)} holds {format_bytes(holder.num_bytes)} in "
        f"{holder.count} parameters and buffers{_mostly(holder)}"
    )
    num_bytes = holder.num_bytes
    remedies = [
        Remedy(
            text=f"hold the model of {told(holder.where)} in bfloat16 (half of it)",
            saved_bytes=holder.num_bytes // 2,
        )
    ]
    if is_second:
        remedies.append(
            Remedy(
                text=f"hold what {told(holder.where)} makes on the host, and move what a batch "
                "needs of it; of a model, compute its outputs once before training",
                saved_bytes=holder.num_bytes,
            )
        )
        for line, graph_bytes in _graphs_of(holder, holders).items():
            num_bytes += graph_bytes
            text += (
                f". Its forward at {_said(line)} keeps {format_bytes(graph_bytes)} for a backward "
                "that nothing needs"
            )
            remedies.append(
                Remedy(
                    text=f"run {told(line)} under torch.no_grad(): nothing trains its model",
                    saved_bytes=graph_bytes,
                )
            )
    return Cause(
        kind="second model" if is_second else PARAMETERS,
        owner=holder.owner,
        where=told(holder.where),
        num_bytes=num_bytes,
        text=text,
        remedies=remedies,
        weight=num_bytes * (_DOUBTFUL if is_second or doubtful else _EXPECTED),
    )


def _graphs_of(model: Holder, holders: Sequence[Holder]) -> dict[Frame, int]:
    """Lines that call a model by its name, not under ``no_grad``, with the bytes that stay."""
    name = None if model.where is None else name_given(model.where)
    found: dict[Frame, int] = {}
    for holder in holders:
        for line, num_bytes in holder.callers.items() if holder.kind == ACTIVATIONS else ():
            calls = name is not None and re.search(rf"\b{name}[.(]", line_of(line))
            if calls and not runs_without_grad([line]):
                found[line] = found.get(line, 0) + num_bytes
    return found


def _optimizer(holder: Holder, total: int) -> Cause:
    state = holder.num_bytes - holder.temporary_bytes
    text = f"the optimizer ({holder.owner}) holds {format_bytes(state)} of state{_mostly(holder)}"
    if holder.temporary_bytes:
        text += (
            f", and {format_bytes(holder.temporary_bytes)} of temporaries of its step, which works "
            "on all parameters at once (foreach)"
        )
    made = None if holder.caller is None else call_of(holder.owner, holder.caller.file)
    text += f"; it is made at {_said(made)}" if made else ""
    text += f"; its step is at {told(holder.caller)}"
    text += ", where memory ran out" * bool(holder.failed_bytes)
    return Cause(
        kind=OPTIMIZER,
        owner=holder.owner,
        where=told(holder.caller),
        num_bytes=total,
        text=text,
        remedies=_shrink(holder),
        weight=total * _EXPECTED,
    )


def _mostly(holder: Holder) -> str:
    is_all = holder.count <= 1 or not holder.part
    return "" if is_all else f", most of it for {holder.part}"


def _gradients(holder: Holder, holders: Sequence[Holder]) -> Cause:
    in_forward = any(each.failed_bytes and each.kind in (ACTIVATIONS, TENSORS) for each in holders)
    release = Remedy(
        text="let go of gradients before the next forward: optimizer.zero_grad(set_to_none=True)",
        saved_bytes=holder.num_bytes,
    )
    sparse = Remedy(
        text=f"take sparse gradients for {holder.part} (sparse=True, torch.optim.SparseAdam): only "
        "of the rows that a batch has",
        saved_bytes=holder.num_bytes,
    )
    return Cause(
        kind=GRADIENTS,
        owner=holder.owner,
        num_bytes=holder.num_bytes,
        text=f"gradients hold {format_bytes(holder.num_bytes)} in {_tensors(holder.count)}"
        + _mostly(holder),
        remedies=[release] * in_forward + [sparse] * ("Embedding at" in holder.part),
        weight=(holder.num_bytes + holder.failed_bytes) * _EXPECTED,
    )


def _computed(holder: Holder, holders: Sequence[Holder], total: int) -> Cause:
    """What a module or a line computes in each round."""
    largest = max(holder.largest_bytes, holder.failed_bytes)
    is_long = holder.usual_bytes is not None and largest >= 3 * max(holder.usual_bytes, 1)
    is_module = holder.kind == ACTIVATIONS
    what = f"{holder.owner} holds" if is_module else f"what {_quoted(holder)} makes holds"
    text = f"{what} {format_bytes(holder.num_bytes)} in {_tensors(holder.count)}"
    if is_module:
        text += f", most of it from {_quoted(holder)}"
        is_elsewhere = holder.caller != holder.where and not _is_for_nothing(holder)
        text += f", called at {told(holder.caller)}" * is_elsewhere
    if not holder.count:
        text = f"{_quoted(holder)} asked for {format_bytes(holder.failed_bytes)}"
    elif holder.failed_bytes:
        text += f"; the {format_bytes(holder.failed_bytes)} that could not be had were for it, too"
    if is_long:
        usual = format_bytes(holder.usual_bytes or 0)
        text += f". In earlier batches its largest tensor had {usual}: this one is larger or longer"
    remedies, where = [], holder.where
    if _is_for_nothing(holder):
        graph = [each for each in holders if _is_for_nothing(each)]
        rest = sum(each.num_bytes - each.kept_bytes for each in graph) - holder.largest_bytes
        remedies.append(_no_grad(holder, rest))
        where = holder.caller
        text = f"no backward ever follows {_forward_of(holder)}, and its graph is kept: {text}"
    if holder.count > 1:
        remedies += _recompute(holder)
    if largest >= 0.4 * total:
        remedies.append(
            Remedy(
                text=f"compute {told(holder.where)} in pieces, or by a fused operation that does "
                "not keep the whole (scaled_dot_product_attention, a chunked loss): an eighth of "
                "its largest tensor stays",
                saved_bytes=largest * 7 // 8,
            )
        )
    is_odd = is_long or _is_for_nothing(holder)
    return Cause(
        kind=holder.kind,
        owner=holder.owner,
        where=told(where),
        num_bytes=total,
        text=text,
        remedies=remedies,
        weight=total * (_DOUBTFUL if is_odd else _EXPECTED),
    )


def _backward(holder: Holder, total: int) -> Cause:
    chain = holder.kept_chain  # of the loss: a backward has no line
    ends, last = [*chain[:1], *chain[-1:]], (*chain, None)[0]
    return Cause(
        kind=BACKWARD,
        owner=holder.owner,
        num_bytes=total,
        where=told(last),
        text=(
            f"the backward holds {format_bytes(holder.num_bytes)} in {_tensors(holder.count)}; it "
            f"follows {' in '.join(dict.fromkeys(map(told, ends)))}"
        ),
        weight=total * _EXPECTED,
    )


def _made_once(holder: Holder, total: int) -> Cause:
    return Cause(
        kind=holder.kind,
        owner=holder.owner,
        where=told(holder.where),
        num_bytes=total,
        text=(
            f"what {_quoted(holder)} made once, before the first round ended, holds "
            f"{format_bytes(holder.num_bytes)} in {_tensors(holder.count)}"
        ),
        remedies=[
            Remedy(
                text=f"keep what {told(holder.where)} makes on the host, and move a batch of it at "
                "a time",
                saved_bytes=holder.num_bytes,
            )
        ],
        weight=total * _EXPECTED,
    )


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' * (count != 1)}"


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
    return holder.owner if holder.where is None else _said(holder.where)


def _said(frame: Frame | None) -> str:
    source = "" if frame is None else line_of(frame)
    return told(frame) + (f" `{source[:80]}`" if source else "")
