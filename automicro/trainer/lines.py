"""What the lines of progress say."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from automicro.duration import Duration, Unit
from automicro.memory import format_bytes, is_uninitialized, peak_bytes
from automicro.policy import Fixed, Halving, Policy
from automicro.trainer.device import describe_device
from automicro.trainer.state import Cut, LoopState

_MOST_METRICS = 8  # in one line


def count_of(number: int, what: str) -> str:
    """A number of things.

    >>> count_of(1, "batch"), count_of(1200, "batch")
    ('1 batch', '1,200 batches')
    """
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{number:,} {what if number == 1 else plural}"


def describe_parameters(parameters: Iterable[nn.Parameter]) -> str:
    """How many numbers a model learns; lazy parameters have no shape yet.

    >>> describe_parameters(nn.Linear(999, 2).parameters())
    '2,000 parameters'
    """
    each = list(parameters)
    known = sum(parameter.numel() for parameter in each if not is_uninitialized(parameter))
    more = " and lazy ones" if any(map(is_uninitialized, each)) else ""
    return count_of(known, "parameter") + more


def describe_size(policy: Policy) -> str:
    """A microbatch size as people write it.

    >>> describe_size(Halving()), describe_size(Fixed(4)), describe_size(Fixed(None))
    ('auto', '4', 'whole batch')
    """
    if isinstance(policy, Halving) and policy.state_dict()["limit"] is None:
        return "auto"
    if isinstance(policy, Fixed):
        size = policy.state_dict()["microbatch_size"]
        return "whole batch" if size is None else str(size)
    return repr(policy)


def start_line(
    *,
    device: torch.device,
    memory_limit: str | int | None,
    precision: str,
    policies: tuple[Policy, Policy],
    parameters: Iterable[nn.Parameter],
    num_batches: int | None,
    max_duration: Duration,
) -> str:
    """What is about to run, and on what."""
    train, evaluation = map(describe_size, policies)
    parts = [
        f"training on {describe_device(device, memory_limit)}",
        "no memory limit" if memory_limit is None else f"memory limit {memory_limit}",
        f"precision {precision}",
        f"microbatch size {train} in train, {evaluation} in eval",
        describe_parameters(parameters),
        f"max_duration {max_duration}",
    ]
    if num_batches is not None:
        parts.append(f"{count_of(num_batches, 'batch')} per epoch")
    return " · ".join(parts)


def batch_line(
    state: LoopState,
    cut: Cut,
    *,
    max_duration: Duration,
    num_batches: int | None,
    device: torch.device,
    samples_per_second: float,
    learning_rate: float | None,
) -> str:
    """Where training stands after a batch."""
    of_epoch = "" if num_batches is None else f"/{num_batches}"
    if max_duration.unit is Unit.EPOCHS:
        where = f"epoch {state.epoch + 1}/{max_duration.value}, batch {state.epoch_batch}{of_epoch}"
    else:
        where = f"batch {state.batch}/{max_duration.value}, epoch {state.epoch + 1}"
    assert state.loss is not None
    parts = [where, f"loss {describe_number(state.loss)}"]
    if learning_rate is not None:
        parts.append(f"lr {learning_rate:.3g}")
    parts += [f"{samples_per_second:,.0f} samples/s", f"microbatches {cut}"]
    peak = peak_bytes(device)
    if peak is not None:
        parts.append(f"peak memory {format_bytes(peak)}")
    return " · ".join(parts)


def describe_number(value: float) -> str:
    """A loss or a metric: four decimals, unless it is too small or too large for them.

    >>> describe_number(1.0), describe_number(0.00001234), describe_number(123456.0)
    ('1.0000', '1.234e-05', '1.235e+05')
    """
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def recovery_line(phase: str, *, before: int, cut: Cut, ooms: int) -> str:
    """A microbatch size that shrank.

    >>> cut = Cut(num_rows=512, microbatch_size=128, num_microbatches=4)
    >>> recovery_line("train", before=512, cut=cut, ooms=2)
    'train: out of memory, microbatch size 512 → 128 rows (4 × 128 of 512; 2 attempts rolled back)'
    """
    size = count_of(cut.microbatch_size, "row")
    return (
        f"{phase}: out of memory, microbatch size {before} → {size} "
        f"({cut}; {count_of(ooms, 'attempt')} rolled back)"
    )


def evaluation_line(values: Mapping[str, float], *, samples: int, cut: Cut, where: str) -> str:
    """What an evaluation found.

    >>> cut = Cut(num_rows=10, microbatch_size=5, num_microbatches=2)
    >>> evaluation_line({"loss": 0.25, "accuracy": 1.0}, samples=10, cut=cut, where="batch 3")
    'eval after batch 3: loss 0.2500, accuracy 1.0000 · 10 samples · microbatches 2 × 5 of 10'
    """
    after = f" after {where}" if where else ""
    found = describe_values(values)
    return f"eval{after}: {found} · {count_of(samples, 'sample')} · microbatches {cut}"


def describe_values(values: Mapping[str, float]) -> str:
    """Loss and metrics in a few words."""
    shown = [
        f"{name} {describe_number(value)}" for name, value in list(values.items())[:_MOST_METRICS]
    ]
    if len(values) > _MOST_METRICS:
        shown.append(f"and {len(values) - _MOST_METRICS} more")
    return ", ".join(shown) or "nothing to report (no loss, no metrics)"
