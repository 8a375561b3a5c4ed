"""Messages of a failing step: why nothing fits, and how microbatches contributed to an error."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import torch

from automicro.batchnorm import needs_two_rows
from automicro.errors import (
    Bystander,
    PeerStoppedError,
    SampleTooLargeError,
    add_note,
    facts_of,
    text_of,
)
from automicro.memory.device import peak_bytes
from automicro.memory.residents import ResidentMemory
from automicro.options import ONE_GRAPH_EACH
from automicro.step.plan import ROWS, Plan
from automicro.units import format_bytes

_LESS_BESIDE = (
    "let it compute and keep less on the device (detach kept tensors and move them to the host)",
    "remove it",
    "a larger device",
)


_WOULD_BE_SMALLER = 'microbatch_size="auto" tries smaller ones'
_STATISTICS_WOULD = (
    "batchnorm keeps batches whole, and batchnorm='warn' splits them, with statistics over fewer "
    "rows"
)
_ENCODERS_WOULD = (
    "the loss compares rows, so it needs all of them, but its encoders can run in smaller slices "
    '(microbatch_size="auto" in Contrastive), and the batch can have fewer rows'
)


def give_up_fixed(
    failure: BaseException, plan: Plan, size: int, *, compares_rows: bool, is_held: bool
) -> NoReturn:
    """Raise the out-of-memory error of a fixed size, with remedies."""
    smaller = _WOULD_BE_SMALLER
    if compares_rows or is_held:
        smaller = _ENCODERS_WOULD if compares_rows else _STATISTICS_WOULD
    if isinstance(failure, PeerStoppedError):
        # The error itself is in the log of that rank only, so name the rank.
        who = "another rank" if failure.culprit is None else f"rank {failure.culprit}"
        raise SampleTooLargeError(
            f"the microbatch size is fixed, and {_of(size, plan)} do not fit on {who}; "
            f"{smaller}. The state is as before the step.{reports_of(failure)}"
        ) from failure
    beside = facts_of(failure).bystander
    # Fewer rows would not help a callback that keeps its inputs.
    if beside is not None:
        add_note(
            failure,
            f"automicro: memory ran out in {beside}, while {_of(size, plan)} were "
            f"computed. The state is as before the step. What helps:{_listed(_LESS_BESIDE)}"
            f"{reports_of(failure, before=_NEXT_LINE)}",
        )
        raise failure
    all_rows = f"the whole batch of {plan.extent} {plan.unit} does"
    what = all_rows if size == plan.extent else f"{_of(size, plan)} do"
    add_note(
        failure,
        f"automicro: the microbatch size is fixed, and {what} "
        f"not fit; {smaller}. The state is as before the step.{reports_of(failure)}",
    )
    raise failure


_NEXT_LINE = "\n"


def _listed(remedies: Iterable[str]) -> str:
    return "".join(f"\n- {each}" for each in remedies)


def reports_of(failure: BaseException, before: str = " ") -> str:
    """Return a sentence on the report files written about a failure; empty if there are none."""
    written = facts_of(failure).reports
    return f"{before}More in {', '.join(written)} (automicro doctor reads it)." if written else ""


def _of(size: int, plan: Plan) -> str:
    return f"{size} {plan.unit} of {plan.extent}"


def why_nothing_fits(
    plan: Plan,
    tried: Sequence[int],
    min_rows: int,
    residents: ResidentMemory | None,
    device: torch.device,
    *,
    who: Bystander | None = None,
    levels: Sequence[str] = ("plain",),
    helps: Sequence[str] = (),
) -> str:
    """Return the reasons why the smallest size ran out of memory, and a list of remedies."""
    # Remove duplicates: a size may be tried again, cut into slices of two rows.
    listed = f"(tried: {', '.join(map(str, dict.fromkeys(tried)))})"
    unit, extent = plan.unit, plan.extent
    state = "\nThe state is as before the step. What helps:"
    if who is not None:
        return (
            f"memory ran out in {who} at every size {listed} of {extent} {unit}, so fewer rows do "
            f"not help.{state}{_listed(_LESS_BESIDE)}"
        )
    at_last = f", not even with {levels[plan.level]}" if plan.level else ""
    text = f"a microbatch of {tried[-1]} of {extent} {unit} does not fit{at_last}, and "
    held = residents or ResidentMemory(parameters=0)
    limit = None if held.limit is None else format_bytes(held.limit)
    # Gradients that are accumulated by hand take the memory of a second model.
    remedies = ["optimizer.zero_grad(), which frees the gradients of earlier batches"] * bool(
        held.earlier_gradients
    )
    if held.shared_inputs:
        remedies.append("smaller tensors in the parts of the batch that all rows share")
    less_state = ["an optimizer with less state"] * bool(held.optimizer_state)
    # If the limit is exceeded without any row, advice about rows would mislead.
    if held.leaves_nothing:
        remedies += [*less_state, "a smaller model", "a higher limit", "a larger device"]
        return (
            f"{text}no size can {listed}: {held} take {format_bytes(held.total)} "
            f"without any row, and the limit is {limit}.{state}{_listed(remedies)}"
        )
    floor = ", because BatchNorm cannot train on one row" * (tried[-1] > 1 < min_rows)
    alone = "" if unit == ROWS else ": it has a single row"
    facts = []
    if (peak := peak_bytes(device)) is not None:
        facts.append(f"Peak memory on {device} was {format_bytes(peak)}.")
    if held.total:
        of_limit = f" of {limit}" if limit else ""
        facts.append(f"Every size needs {format_bytes(held.total)}{of_limit} for {held}.")
    # If more than half of the limit is taken without any row, the samples are not the problem.
    if held.limit is None or held.total <= held.limit / 2:
        remedies.append("shorter or smaller samples")
    elif not held.shared_inputs:
        remedies.append("a smaller model")
    remedies += [*helps, *less_state, "a larger device"]
    told = "\n" + " ".join(facts) if facts else ""
    return f"{text}there is no smaller one{floor}{alone} {listed}.{told}{state}{_listed(remedies)}"


# Remedies besides fewer rows, by level or precision: in words, and as an option. A level includes
# the levels before it.
_HELPS = {
    "recompute": ("activation checkpointing", "when_too_large={}"),
    "offload": ("host memory for tensors saved for the backward", "when_too_large={}"),
    "nested": (
        "outputs and their loss in slices",
        "when_too_large={} for models of transformers, automicro.split for others",
    ),
    "bf16": ("half precision", "precision='bf16'"),
}


def what_helps(level: str | None) -> list[str]:
    """Return remedies that reduce the memory of the same rows.

    >>> what_helps("plain")[0]
    "activation checkpointing (when_too_large='recompute')"
    """
    on = [] if level in (None, "plain") else str(level).split(" + ")
    return [
        f"{how} ({option.format([*on, name] if on else repr(name))})"
        for name, (how, option) in _HELPS.items()
        if name not in on and (level is not None or name == "bf16")
    ]


_USED_TWICE = "backward through the graph a second time"  # as torch says it
# Words that mark a message about shapes.
_SHAPES = re.compile(r"\b(sizes?|shapes?|dims?|dimensions?|dimensional|D)\b|\dD\b", re.IGNORECASE)


def explain(error: BaseException, plan: Plan) -> None:
    """Add notes to an error about how microbatches may have contributed to it."""
    # Otherwise it comes from a metric or callback, not the forward.
    if facts_of(error).bystander is None:
        for note in _contributions(error, plan):
            add_note(error, f"automicro: {note}")


def _contributions(error: BaseException, plan: Plan) -> Iterator[str]:
    num_rows = sum(cut.num_rows for cut in plan.cuts)
    split = [cut for cut in plan.cuts if cut.is_split]
    is_of_shapes = isinstance(error, RuntimeError | IndexError | ValueError | TypeError)
    if needs_two_rows(error) and num_rows == 1:
        rows = plan.num_global_rows
        who = "the batch has no other row" if rows == 1 else f"this rank has one of {rows} rows"
        yield (
            f"BatchNorm cannot train on one row, and {who}. Use drop_last=True in the data "
            "loader, which drops this last batch, or another batch size"
        )
    elif needs_two_rows(error) and plan.leaves_one_alone:
        yield (
            f"BatchNorm cannot train on one row, but slices of at most {plan.size} of {num_rows} "
            'rows leave a single row. Use another microbatch_size, or "auto", which avoids single '
            "rows"
        )
    elif split and is_of_shapes and _SHAPES.search(text_of(error)):
        alone = next((cut for cut in split if cut.leaves_one_alone), None)
        if alone is not None:
            which = "each microbatch has" if alone.largest == 1 else "the last microbatch has"
            yield (
                f"{which} one of {alone.num_rows} rows. If more rows succeed, a .squeeze() "
                "without a dimension may have removed the dimension of the rows: name the "
                "dimension to squeeze, as in .squeeze(-1)"
            )
        else:
            yield (
                f"microbatches have at most {split[0].largest} of {split[0].num_rows} rows. If "
                "the whole batch succeeds, the forward may process its rows in groups: use sizes "
                "that hold whole groups, as in microbatch_size=Halving(multiple_of=4). If a tensor "
                "as long as the batch holds no rows (a table, positions), pass batch_layout="
                "{'its name': 'shared'}. Or keep batches whole with microbatch_size=None"
            )
    if split and _USED_TWICE in text_of(error):
        yield (
            "each microbatch has its own backward. The first backward frees any graph that was "
            f"built before the forward and is used in it; {ONE_GRAPH_EACH}"
        )
