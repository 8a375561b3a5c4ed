"""The two phases of a `Microbatcher`, from its options."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from automicro.attempts.phase import Phase
from automicro.attempts.recollection import Recollection
from automicro.observer import Observer
from automicro.policy import Policy, make_policy
from automicro.ranks import Ranks
from automicro.reach import Reach
from automicro.size_cache.describing import describe_run, describe_shapes
from automicro.slicing import BatchLayout
from automicro.transaction import BufferMemory

Size = int | str | Policy | None


def make_phases(
    modules: Sequence[nn.Module],
    device: torch.device,
    *,
    microbatch_size: Size,
    eval_microbatch_size: Size,
    strict_divisible: bool,
    remember_sizes: bool,
    repeatable: bool,
    optimizer: torch.optim.Optimizer | None,
    precision: str,
    layout: BatchLayout,
    observer: Observer | None,
    ranks: Ranks,
    reach: Reach,
) -> tuple[Phase, Phase]:
    """Training, and evaluation.

    Args:
        modules: everything that takes part.
        device: where they compute.
        microbatch_size: of training.
        eval_microbatch_size: of evaluation.
        strict_divisible: whether training refuses a batch that is not a multiple of the size.
        remember_sizes: whether ``"auto"`` starts where an earlier run ended.
        repeatable: whether sizes may not depend on how long attempts took.
        optimizer: part of what a size is remembered for, as are precision and layout.
        precision: of the forward.
        layout: of batches.
        observer: told of every attempt; None for nobody.
        ranks: that run steps together.
        reach: modules and generators that the caller's functions get at by themselves.

    Raises:
        TypeError, ValueError: what cannot be a size.
    """
    buffers = BufferMemory(modules, reach.modules)

    def make(name: str, size: Size, argument: str, *, strict: bool = False) -> Phase:
        describe = partial(
            describe_run,
            modules,
            device=device,
            optimizer=optimizer,
            precision=precision,
            phase=name,
            layout=layout,
            world_size=ranks.world_size,
        )
        remembers = remember_sizes and isinstance(size, str)
        return Phase(
            name,
            make_policy(size, name=argument),
            modules,
            device,
            strict_divisible=strict,
            repeatable=repeatable,
            observer=observer,
            ranks=ranks,
            reach=reach,
            buffers=buffers,
            recollection=(
                Recollection(describe, partial(describe_shapes, layout=layout))
                if remembers
                else None
            ),
        )

    return (
        make("train", microbatch_size, "microbatch_size", strict=strict_divisible),
        make("eval", eval_microbatch_size, "eval_microbatch_size"),
    )
