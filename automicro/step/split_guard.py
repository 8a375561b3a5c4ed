"""Guard against effects of splitting on a model: forbid it, or warn once."""

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from automicro.batchnorm import (
    batchnorm_buffers,
    batchnorm_message,
    evaluation_message,
    sees_the_batch,
)
from automicro.errors import BatchNormWarning, BufferWarning, UnsplittableModelError, warn
from automicro.modules import ModuleIndex
from automicro.policy.policy import Fixed, Policy
from automicro.state.part import State

if TYPE_CHECKING:
    from automicro.checking.check import Checks, Occasions

BATCHNORM_MODES = ("warn", "error", "disable", "ignore", "exact")


class SplitGuard:
    """The guard for layers that average over the batch, and buffers that count microbatches."""

    def __init__(self, index: ModuleIndex, mode: str, whole: Policy | None = None) -> None:
        self._index = index
        self._mode = mode
        self._whole = Fixed(None) if whole is None else whole
        self._has_warned: set[bool] = set()  # whether in evaluation
        self._named_buffers: set[str] = set()
        self._named_state: set[str] = set()

    @functools.cached_property
    def _occasions(self) -> "tuple[Occasions, Occasions]":
        """The rules that select split batches, in training and in evaluation."""
        from automicro.checking.check import Occasions

        return Occasions(), Occasions()

    def allowed(self, policy: Policy, *, evaluates: bool = False) -> Policy:
        """Return the policy, or whole batches only if layers that average over them require it."""
        # In evaluation only layers without running statistics average over the batch.
        if self._mode not in ("error", "disable", "exact"):
            return policy
        # Evaluation needs no levels: they save memory of a backward, which it does not have.
        whole = Fixed(None) if evaluates else self._whole
        if policy is whole or policy.state_dict() == Fixed(None).state_dict():
            return policy
        names = self._batchnorm_names()
        if not names:
            return policy
        if self._mode != "error":  # "exact": the model itself cuts, stage by stage
            return whole
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        averaging = "layers average over the batch"
        remedy = "Give batchnorm='exact', replace them (GroupNorm), or train on"
        if evaluates:
            averaging = "layers without running statistics average over it in evaluation, too"
            remedy = "Replace them (GroupNorm), or evaluate"
        size = "eval_microbatch_size" if evaluates else "microbatch_size"
        raise UnsplittableModelError(
            f"batchnorm='error', and {averaging}: {listed}. {remedy} whole batches only with "
            f"{size}=None or batchnorm='disable'"
        )

    def allow_measuring(self, policy: Policy) -> None:
        """Keep a policy from cutting batches only to measure, if layers average over them."""
        # Repeated before each step, because layers are frozen and thawed. The caller asked for
        # exploring, so "ignore" allows it.
        if policy.wants_to_measure:
            accepts = policy.explores and self._mode == "ignore"
            policy.may_measure = accepts or not self._batchnorm_names()

    @staticmethod
    def could_split(policy: Policy, rows: Sequence[int], *, by_cost: bool = False) -> bool:
        """Whether a policy from `allowed` might ever split batches of these rows."""
        # Several batches in a step count as split. Rows with costs are split to save padding.
        if len(rows) != 1 or by_cost:
            return bool(rows)
        return policy.adapts or policy.propose(rows[0]) < rows[0]

    def know(self, names: Iterable[str]) -> None:
        """Suppress warnings about attributes or variables."""
        self._named_state.update(names)

    def warn(
        self,
        sizes: Sequence[int],
        state: State,
        checks: "Checks | None" = None,
        *,
        evaluates: bool = False,
    ) -> None:
        """Warn when a batch is first split, and when more buffers change later."""
        # Called inside the attempt, so that it is rolled back if warnings are errors.
        if self._mode == "ignore":
            return
        counting, adds_up = (checks.counting, checks.adds_up) if checks else ([], {})
        new = [name for name in counting if name not in self._named_state]
        if new:
            self._named_state.update(new)
            warn(_state_message("attributes or variables", new, len(sizes)), BufferWarning)
        names = [] if evaluates in self._has_warned else self._batchnorm_names()
        if names:
            about = evaluation_message if evaluates else batchnorm_message
            warn(about(names, max(sizes), sum(sizes)), BatchNormWarning)
            self._has_warned.add(evaluates)  # not before: warnings may be errors
        # Compare content only in some batches, because that waits for the device.
        by_content = self._occasions[evaluates].is_next()
        if evaluates and not by_content:
            return
        changed = self._index.changed_buffers(state.changed_tensors(by_content=by_content))
        known = {*self._batchnorm_buffers(), *self._named_buffers}
        others = [e for e in changed if not (e in known or adds_up.get(e))]
        if others:
            message = _state_message("buffers", others, len(sizes), evaluates=evaluates)
            warn(message, BufferWarning)
        self._named_buffers |= {*others, *known}

    def _batchnorm_names(self) -> list[str]:
        return [name for name, layer in self._index.batchnorms if sees_the_batch(layer)]

    def _batchnorm_buffers(self) -> list[str]:
        """Return the buffers of these layers, by every name of a shared layer."""
        return [
            prefix + name
            for prefix, root in self._index.roots.items()
            for name in batchnorm_buffers(root)
        ]


def _state_message(
    kind: str, names: Sequence[str], num_microbatches: int, *, evaluates: bool = False
) -> str:
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    what, argument = "training forward", "microbatch_size"
    update = "Update them once per step outside the forward"
    if evaluates:
        what, argument = "forward in evaluation", "eval_microbatch_size"
        update = "Leave them unchanged, or update them once per batch outside the forward"
    return (
        f"the {what} changes {kind}: {listed}. A split batch changes them {num_microbatches} "
        f"times, once per microbatch, so they can depend on the microbatch size. {update}, or "
        f"keep batches whole with {argument}=None; batchnorm='ignore' accepts this, too"
    )
