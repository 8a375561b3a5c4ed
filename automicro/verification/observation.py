"""What one forward and backward of the whole batch changes beside the gradients."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from automicro.batch.tensors import tensor_leaves
from automicro.batchnorm import batchnorm_buffers, find_batchnorm
from automicro.loss.look import Compared
from automicro.modules import ModuleIndex
from automicro.transaction.buffers import BufferHistory, Buffers
from automicro.transaction.surroundings import foreign_states
from automicro.verification.laboratory import (
    Conditions,
    Frozen,
    Laboratory,
    Stage,
    changed_attributes,
    describe,
    freeze_attributes,
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
        attributes: plain attributes that it changed, by module and name.
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
    attributes: tuple[tuple[str, str], ...]
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
        buffers = Buffers(BufferHistory(ModuleIndex(roots.values())), tensors_only=True)
        buffers.begin()
        frozen = Frozen(batch)
        leaves = {path: Frozen(leaf) for path, leaf in tensor_leaves(batch)}
        attributes = freeze_attributes(roots)
        foreign = foreign_states()
        own = {path: Frozen(each) for path, each in own_generators(roots)}
        measured = laboratory.run_whole(stage, batch)
        drawn_from = [
            name
            for name, before, after in zip(_FOREIGN, foreign, foreign_states(), strict=True)
            if before != after
        ]
        for path, each in own_generators(roots):
            if isinstance(each, torch.Generator) or path not in own:
                continue
            if next(own[path].changes(Frozen(each), path), None) is not None:
                drawn_from.append(path)
        changed = changed_attributes(attributes, freeze_attributes(roots))
        own_paths = {path for path, _ in own_generators(roots)}
        seen = Observation(
            measured=measured,
            batchnorm=tuple(
                f"{p}{name}" for p, root in roots.items() for name in find_batchnorm(root)
            ),
            is_training=stage.subject.model.training,
            inputs=_changed_leaves(batch, frozen, leaves),
            buffers=_changed_buffers(stage, buffers),
            attributes=tuple(key for key in changed if describe(*key) not in own_paths),
            generators=tuple(drawn_from),
            drawn=tuple(sorted(stage.silence.drawn)),
            unsilenced=tuple(sorted(stage.silence.unsilenced)),
            repeats=False,
            lowest=stage.silence.lowest,
        )
        if not (seen.drawn or seen.unsilenced):
            return seen
        return replace(seen, repeats=laboratory.draws_repeat(stage, batch))


def _changed_leaves(batch: Any, frozen: Frozen, leaves: dict[str, Frozen]) -> tuple[str, ...]:
    now = dict(tensor_leaves(batch))
    changed = [
        path or "the batch"
        for path, before in leaves.items()
        if path not in now or next(before.changes(Frozen(now[path]), path), None) is not None
    ]
    if not changed:  # arrays, lists and whatever else is no tensor
        changed = [path or "the batch" for path in frozen.changes(Frozen(batch), "")]
    return tuple(changed)


def _changed_buffers(stage: Stage, buffers: Buffers) -> tuple[str, ...]:
    of_batchnorm = {
        f"{prefix}{name}"
        for prefix, root in stage.roots.items()
        for name in batchnorm_buffers(root)
    }
    return tuple(name for name in buffers.changed_names() if name not in of_batchnorm)
