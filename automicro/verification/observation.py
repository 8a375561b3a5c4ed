"""What one forward and backward of the whole batch changes beside the gradients."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from automicro.batch.tensors import tensor_leaves
from automicro.batchnorm import batchnorm_buffers, find_batchnorm
from automicro.checking.reading import Compared
from automicro.checking.state import changed_places
from automicro.state.capture import Captured, capture
from automicro.torch_private import buffer_table
from automicro.transaction.rng import foreign_states
from automicro.values import differs
from automicro.verification.laboratory import (
    Conditions,
    Laboratory,
    named_modules,
    own_generators,
)

_FOREIGN = ("Python's random", "numpy's random")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One run of the whole batch, watched.

    Attributes:
        measured: its loss and gradients.
        batchnorm: layers that normalise over the rows.
        is_training: whether the model was in training mode.
        inputs: leaves of the batch that the forward wrote into.
        buffers: buffers that it changed, but for those of BatchNorm.
        attributes: plain attributes that it changed, and, behind an arrow, variables of functions.
        generators: those that are not torch's and that it drew from.
        drawn: torch's functions that would have drawn.
        unsilenced: those that did.
        repeats: whether the forward sets the seed of its draws by itself.
        lowest: the lowest type that float64 was cast to, if any.
    """

    measured: Compared
    batchnorm: tuple[str, ...]
    is_training: bool
    inputs: tuple[str, ...]
    buffers: tuple[str, ...]
    attributes: tuple[str, ...]
    generators: tuple[str, ...]
    drawn: tuple[str, ...]
    unsilenced: tuple[str, ...]
    repeats: bool
    lowest: torch.dtype | None


def observe(laboratory: Laboratory, conditions: Conditions) -> Observation:
    """Run the whole batch once, and look at what it changes."""
    with laboratory.stage(conditions) as stage:
        roots = stage.roots
        batch = laboratory.on_device(laboratory.batch())
        leaves = {path: leaf.detach().clone() for path, leaf in tensor_leaves(batch)}
        of_batch = capture({"": batch})
        examined = {**stage.subject.tops, **stage.subject.functions()}
        of_model = capture(examined)
        tables = [(name, dict(buffer_table(each))) for name, each in named_modules(roots)]
        own = dict(own_generators(roots))
        foreign = foreign_states()
        measured = laboratory.run_whole(stage, batch)
        states = zip(_FOREIGN, foreign, foreign_states(), strict=True)
        drawn_from = [name for name, before, after in states if before != after]
        names = {id(module): name for name, module in named_modules(roots)}
        changed = [
            f"{names[id(each.owner)]}{each.key}".lstrip(".")
            if id(each.owner) in names
            else f"→{each.name}"
            for each in changed_places(examined, of_model)
        ]
        drawn_from += [
            path for path in changed if path in own and not isinstance(own[path], torch.Generator)
        ]
        tables += [(name, dict(buffer_table(each))) for name, each in named_modules(roots)]
        buffers = {f"{name}.{key}".lstrip(".") for name, table in tables for key in table}
        seen = Observation(
            measured=measured,
            batchnorm=tuple(
                f"{p}{name}" for p, root in roots.items() for name in find_batchnorm(root)
            ),
            is_training=stage.subject.model.training,
            inputs=_changed_leaves(batch, leaves, of_batch),
            buffers=tuple(path for path in changed if path in buffers - _of_batchnorm(roots)),
            attributes=tuple(path for path in changed if path not in buffers | own.keys()),
            generators=tuple(drawn_from),
            drawn=tuple(sorted(stage.silence.drawn)),
            unsilenced=tuple(sorted(stage.silence.unsilenced)),
            repeats=False,
            lowest=stage.silence.lowest,
        )
        if not (seen.drawn or seen.unsilenced):
            return seen
        return replace(seen, repeats=laboratory.draws_repeat(stage, batch))


def _changed_leaves(
    batch: Any, leaves: Mapping[str, Tensor], captured: Captured
) -> tuple[str, ...]:
    now = dict(tensor_leaves(batch))
    changed = [
        path
        for path, before in leaves.items()
        if path not in now or differs(before, now[path].detach())
    ]
    if not changed:  # arrays, lists and whatever else is no tensor
        changed = [".".join(re.findall(r"\w+", path)) for path in captured.changed()]
    return tuple(path or "the batch" for path in changed)


def _of_batchnorm(roots: Mapping[str, nn.Module]) -> set[str]:
    return {f"{prefix}{name}" for prefix, root in roots.items() for name in batchnorm_buffers(root)}
