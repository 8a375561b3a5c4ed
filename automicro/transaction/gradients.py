"""Gradients: set aside during an attempt, and added to when it commits.

In between, ``.grad`` belongs to the attempt. Microbatches accumulate there, because it costs least,
but the user's forward could read and clear it and hooks would see parts of the gradient. So

- hooks are held back, and run once at the commit, with the whole gradient;
- one check at the end shows whether only our own backwards added to ``.grad``. If a batch is split,
  a forward that clears gradients or calls backward itself is an error;
- parameters in bf16 or fp16 accumulate in float32, which is hidden while a forward runs.

On several ranks, wrappers have hooks and accumulation of their own, so all of this is left to them.
"""

import contextlib
import logging
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from automicro.errors import GradientWarning, LossError, RollbackError, warn
from automicro.memory.oom import Failure, caught, classify
from automicro.torch_private import is_view, node_hooks, version_of, versions_of, with_hooks
from automicro.transaction.leaves import (
    HeldHooks,
    OutsideLeaves,
    deliver,
    leaves_of,
    refuse_unknown_part,
)

if TYPE_CHECKING:
    from automicro.transaction.writes import GradientWrites

# A check walks the whole graph of a loss, so only some batches are checked.
_LOOKED_BATCHES = (1, 2, 4, 8)
_LOOKED_MICROBATCHES = 4


class TouchedGradientsError(Exception):
    """A signal to repeat the attempt with newly found leaves. It never leaves a step."""


class GradientHistory:
    """The history of the gradients of one model.

    Attributes:
        writes_to_gradients: whether the forward writes into the gradients of earlier batches;
            None until that is known.
        is_watched: whether gradients are compared before and after each forward.
        are_released: whether the forward clears the gradients of earlier batches, which are not
            restored if it fails afterwards.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module] = (),
        *,
        sums_in_float32: bool = True,
        is_alone: bool = True,
        can_look: bool = True,
    ) -> None:
        self.sums_in_float32 = sums_in_float32
        self.is_alone = is_alone
        self.is_watched = False
        self.writes_to_gradients: bool | None = None
        self.are_released = False
        self._modules = modules
        self._can_look = can_look
        self._outside: list[TensorWeakRef] = []
        self._last: Mapping[int, Tensor] = {}
        self._num_batches = 0
        self._has_split = self._has_looked_at_nodes = False
        self._told: set[str] = set()

    def next_batch(self, parameters: Mapping[int, Tensor]) -> None:
        """Start a new batch for these parameters, by id."""
        self._num_batches += 1
        # The index returns the same mapping unless something has changed.
        if parameters is not self._last and parameters.keys() != self._last.keys():
            self._num_batches = 1  # layers were added, or replaced
            self._has_looked_at_nodes = False
        self._last = parameters

    def num_looks(self, *, is_retry: bool, splits: bool) -> int:
        """Return how many microbatches to check for the leaves that their losses reach."""
        looks = is_retry or self._num_batches in _LOOKED_BATCHES or self._has_split < splits
        self._has_split |= splits
        return _LOOKED_MICROBATCHES if looks and self._can_look else 0

    def outside(self) -> list[Tensor]:
        """Return leaves that losses have reached although no module lists them."""
        if not self._outside:
            return []
        self._outside = [each for each in self._outside if each() is not None]
        return [leaf for each in self._outside if (leaf := each()) is not None]

    def remember(self, leaf: Tensor) -> None:
        """Remember a leaf that no module lists."""
        # By a weak reference, so that this history does not keep it alive.
        self._outside.append(TensorWeakRef(leaf))

    def look_at_nodes(self, leaves: Iterable[Tensor]) -> None:
        """Warn once of hooks that cannot be held back."""
        if self._has_looked_at_nodes:
            return
        self._has_looked_at_nodes = True
        found = [leaf for leaf in leaves if leaf.requires_grad and node_hooks(leaf)]
        self._tell(
            found,
            "hooks on the AccumulateGrad node of {} get the gradient of every microbatch, not "
            "that of the whole batch. Register them on the parameter (register_hook, "
            "register_post_accumulate_grad_hook), where they run once, or keep batches whole with "
            "microbatch_size=None",
        )

    def warn_of_hooks(self, leaves: Iterable[Tensor]) -> None:
        """Warn once of hooks on several ranks, where they see parts of the gradient."""
        self._tell(
            with_hooks(leaves),
            "hooks on {} get the gradient of every microbatch, not that of the whole batch, "
            "because on several ranks the wrapper of the model adds up the gradients. Clip or "
            "change gradients between backward() and the optimizer's step",
        )

    def warn_of_late_hooks(self, leaves: Iterable[Tensor], held: Iterable[Tensor]) -> None:
        """Warn once of hooks that the forward itself registered."""
        known = set(map(id, held))
        self._tell(
            [leaf for leaf in with_hooks(leaves) if id(leaf) not in known],
            "the forward registers hooks on {}: one for every microbatch, so they get parts of "
            "the gradient. Register them once, before training",
        )

    def _tell(self, found: Sequence[Tensor], text: str) -> None:
        if found and text not in self._told:
            self._told.add(text)
            warn(text.format(self._names(found)), GradientWarning)

    def refuse_touching(self, leaves: Iterable[Tensor]) -> NoReturn:
        """Name the leaves whose gradients were changed by something other than our backwards."""
        raise LossError(
            f"the forward (or backward=) changes .grad of {self._names(leaves)} itself, where "
            "microbatches add up: it calls backward, or clears or clips gradients. Remove "
            "loss.backward() and return the sum of all losses on which it was called. Compute "
            "gradients that the forward needs with torch.autograd.grad, and clip and clear "
            "gradients after backward() returns"
        )

    def _names(self, leaves: Iterable[Tensor]) -> str:
        named = {id(p): name for module in self._modules for name, p in module.named_parameters()}
        names = [repr(named.get(id(leaf), "a tensor outside the model")) for leaf in leaves]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(dict.fromkeys(names[:3])) + more


logger = logging.getLogger(__name__)

_NO_HOOKS = HeldHooks()
_NOTHING = contextlib.nullcontext()
NARROW = frozenset({torch.bfloat16, torch.float16})
Backward = Callable[..., Any]


@dataclass(slots=True)
class _Earlier:
    """A gradient from before the attempt."""

    leaf: Tensor
    gradient: Tensor  # which other code may hold, too
    copy: Tensor | None  # of its values, if they might be written to
    version: int  # reveals writes
    is_cleared: bool = False  # whether the forward cleared it, so that it no longer counts
    is_gone: bool = False  # whether the forward released the tensor itself


class Gradients:
    """The ``.grad`` of parameters, of inputs that require one, and of other leaves of a loss."""

    # An attempt starts without gradients. A rollback drops its gradients and restores the earlier
    # tensors. A commit adds into these *same* tensors, so that code that holds them (a flat bucket,
    # a captured graph) still holds the gradient. While gradients exist this costs a second set,
    # which `zero_grad(set_to_none=True)` before the step avoids.
    def __init__(
        self,
        parameters: Mapping[int, Tensor],
        memory: GradientHistory | None = None,
        *,
        inputs: Sequence[Tensor] = (),
    ) -> None:
        self._memory = memory or GradientHistory()
        self._parameters = parameters  # by id
        self._inputs: dict[int, Tensor] = {}
        if inputs:
            self._inputs = {id(e): e for e in inputs if id(e) not in self._parameters}
        self._further = dict(self._inputs)  # leaves that are not parameters
        self._leaves: list[Tensor] = []
        self._earlier: list[_Earlier] = []
        self._finals: list[tuple[_Earlier, Tensor]] = []
        self._begun = False
        self._attempts = 0
        self._has_restarted = False
        self._went_unseen = False
        self._forget()

    def _forget(self) -> None:
        self._hooks = _NO_HOOKS
        self._outside: OutsideLeaves | None = None  # until a check finds some
        self._narrow: list[tuple[Tensor, torch.dtype]] = []
        self._sums: list[Tensor | None] = []  # after the first or last backward, for comparison
        self._versions: list[int] = []  # of these sums
        self._sums_away: list[Tensor | None] = []  # while a forward runs
        self._num_forwards = self._num_backwards = 0
        self._splits = False
        self.is_steady = False  # whether the remaining forwards need no handling
        self._looks = 0
        self._finals = []

    # One attempt

    def begin(self) -> None:
        self._attempts += 1
        if self._attempts == 1:
            self._memory.next_batch(self._parameters)
        for leaf in self._memory.outside():
            if id(leaf) not in self._parameters:
                self._further[id(leaf)] = leaf
        self._leaves = [*self._parameters.values(), *self._further.values()]
        self._earlier = [
            _Earlier(
                leaf,
                gradient,
                # The owner of the storage, such as DDP's bucket, might write into it.
                gradient.clone() if _shares_storage(gradient) else None,
                version_of(gradient),
            )
            for leaf in self._leaves
            if (gradient := leaf.grad) is not None
        ]
        # Remove gradients only after all copies exist: if memory runs out for one, `roll_back` has
        # nothing to do.
        self._begun = True
        for each in self._earlier:
            each.leaf.grad = None

    def expect(self, num_microbatches: int) -> None:
        """Set the number of microbatches of the attempt, before the first."""
        memory = self._memory
        self._splits = num_microbatches > 1
        self._looks = memory.num_looks(is_retry=self._attempts > 1, splits=self._splits)
        if memory.is_alone:
            hooked = with_hooks(self._leaves)
            if hooked:
                self._hooks = HeldHooks(hooked)
            if self._splits:
                memory.look_at_nodes(self._leaves)
                if memory.sums_in_float32:
                    self._narrow = [
                        (leaf, leaf.dtype)
                        for leaf in self._leaves
                        if leaf.dtype in NARROW
                        and id(leaf) not in self._inputs
                        # Otherwise other code already accumulates it in float32.
                        and leaf.grad_dtype is leaf.dtype
                    ]
        elif self._splits:
            memory.warn_of_hooks(self._leaves)

    def before_forward(self) -> None:
        """Prepare for a forward; call it before every microbatch."""
        # By now leaves of the last microbatch are freed, unless other code holds them.
        if self._outside:
            self._take_in()
        self._num_forwards += 1
        if not self._memory.is_alone:
            return
        if self._num_forwards == 1:
            self._show_earlier()
        elif self._narrow:
            self._put_away()

    def run(
        self, backward: Backward, loss: Tensor, *start: Tensor, is_nothing: bool = False
    ) -> None:
        """Run the backward of a microbatch."""
        if self.is_steady:
            backward(loss, *start)
            self._num_backwards += 1
            return
        if self._num_backwards < self._looks:
            self._notice(loss)
        else:
            # It may give gradients to leaves that no check has found; `_take_in` needs to know.
            self._went_unseen = True
        writes = None if is_nothing else self._watch(backward)
        with self._hooks.held() if self._hooks.leaves else _NOTHING, writes or _NOTHING:
            backward(loss, *start)
        touched = () if writes is None else writes.touched()
        # The only gradient of a whole batch may be changed: nothing is added to it.
        if touched and (self._splits or any(e.gradient.to_dense().any() for e in self._earlier)):
            self._memory.refuse_touching(touched)
        self._num_backwards += 1
        if self._memory.is_alone:
            self._after_backward()

    def _watch(self, backward: Backward) -> "GradientWrites | None":
        """Return a detector of writes to ``.grad`` if the caller's backward might clip it."""
        looks = self._splits and self._num_backwards < self._looks
        # Earlier gradients are set aside, so a backward that clips the sum would miss them.
        is_callers = backward is not Tensor.backward and self._memory.is_alone
        if not (self._memory.is_watched or (is_callers and (looks or self._earlier))):
            return None
        from automicro.transaction.writes import GradientWrites

        return GradientWrites(self._leaves)

    def run_for_nothing(self, backward: Backward, loss: Tensor) -> None:
        """Run a backward whose gradients are known to be zero, although they may compute as NaN."""

        # A mean over no target divides by zero. The backward still runs, because hooks and
        # collectives depend on it, and sets gradients that did not exist to zeros.
        def backward_aside(loss: Tensor) -> None:
            # Separate from the sums of other microbatches, which a NaN would spoil.
            sums = [leaf.grad for leaf in self._leaves]
            for leaf in self._leaves:
                leaf.grad = None
            backward(loss)
            for leaf, total in zip(self._leaves, sums, strict=True):
                if total is not None:
                    leaf.grad = total
                elif leaf.grad is not None:
                    leaf.grad = torch.zeros_like(leaf.grad)

        self.run(backward_aside, loss, is_nothing=True)

    def after_forward(self) -> None:
        """Return ``.grad`` to the attempt; call it after the forward of every microbatch."""
        if self.is_steady or not self._memory.is_alone:
            return
        if self._num_forwards == 1:
            self._end_of_showing()
        if self._narrow:
            self._bring_back()
        elif self._sums and self._memory.is_watched:
            self._require_kept()

    @property
    def is_reached(self) -> bool:
        """Whether any microbatch had a backward."""
        return self._num_backwards > 0

    def require_untouched(self) -> None:
        """Check that only our backwards added to ``.grad``; call it after the last microbatch."""
        if self._outside:
            self._take_in()
        if not (self._memory.is_alone and self._splits):
            return
        if not self._memory.is_watched:
            self._require_as_many()
        if self._looks:
            self._memory.warn_of_late_hooks(self._leaves, self._hooks.leaves)

    def _require_as_many(self) -> None:
        """Check that each gradient is the first backward's plus one addition per later backward."""
        now = [leaf.grad for leaf in self._leaves]
        most = self._num_backwards - 1
        additions = list(map(operator.sub, versions_of(now), self._versions))
        if all(map(operator.is_, now, self._sums)) and max(additions, default=0) <= most:
            return
        for each, first, added in zip(now, self._sums, additions, strict=True):
            # For a leaf that the first backward did not reach, there is nothing to compare.
            if first is not None and (each is not first or added > most):
                # A backward may have others inside it, which add more often. The next attempt
                # finds out, by comparing before and after each forward.
                self._memory.is_watched = True
                raise TouchedGradientsError("gradients were changed outside of backwards")

    def _require_kept(self) -> None:
        """Check that nothing has changed since the last backward."""
        now = [leaf.grad for leaf in self._leaves]
        pairs = zip(now, self._sums, versions_of(now), self._versions, strict=True)
        touched = [
            leaf
            for leaf, (each, last, version, known) in zip(self._leaves, pairs, strict=True)
            if each is not last or version != known
        ]
        if touched:
            self._memory.refuse_touching(touched)

    # Before and after the user's forward

    def _show_earlier(self) -> None:
        """Show the first forward the gradients of earlier batches, which it may clear."""
        for each in self._earlier:
            # Copied until a committed batch has shown that the forward does not change them.
            may_write = self._memory.writes_to_gradients is not False
            if each.copy is None and may_write and not self._memory.are_released:
                each.copy = each.gradient.clone()
            each.version = version_of(each.gradient)
            each.leaf.grad = each.gradient

    def _end_of_showing(self) -> None:
        """Remove them again; with a whole batch the forward may clear them, but not change them."""
        touched = [leaf for leaf in self._leaves if leaf.grad is not None]
        if self._earlier:
            shown = {id(each.leaf) for each in self._earlier}
            touched = [leaf for leaf in touched if id(leaf) not in shown]
            touched += [each.leaf for each in self._earlier if not self._is_as_shown(each)]
        if touched:
            self._memory.refuse_touching(touched)
        for each in self._earlier:
            each.leaf.grad = None
        if self._memory.are_released:  # the forward has released them
            self._earlier = [each for each in self._earlier if not each.is_gone]

    def _is_as_shown(self, each: "_Earlier") -> bool:
        """Record whether a forward cleared a gradient; return whether its state is valid."""
        now = each.leaf.grad
        if now is None:
            each.is_cleared = each.is_gone = True
            return not self._splits
        if now is not each.gradient:
            return False
        if version_of(now) == each.version:
            return True
        # `zero_grad(set_to_none=False)` writes zeros, which also counts as clearing.
        is_zero = not bool(now.to_dense().any())
        if each.copy is not None:
            now.copy_(each.copy)
        elif is_zero and self._memory.are_released:
            each.version = version_of(now)  # the state that a rollback restores
        else:
            raise _cannot_undo()
        each.is_cleared = self._memory.writes_to_gradients = True
        return is_zero and not self._splits

    def _put_away(self) -> None:
        """Hide sums in float32 from a forward, which sees gradients of its parameters' dtype."""
        self._sums_away = [leaf.grad for leaf in self._leaves]
        for leaf in self._leaves:
            leaf.grad = None
        self._narrow_again()

    def _bring_back(self) -> None:
        touched = [leaf for leaf in self._leaves if leaf.grad is not None]
        if touched:
            self._memory.refuse_touching(touched)
        # Torch refuses a gradient of another dtype than the leaf's, unless `grad_dtype` allows it.
        for leaf, _ in self._narrow:
            leaf.grad_dtype = torch.float32
        for leaf, total in zip(self._leaves, self._sums_away, strict=False):
            leaf.grad = total
        self._sums_away = []

    def _after_backward(self) -> None:
        if not self._splits:
            return
        is_watched = self._memory.is_watched
        if is_watched or self._num_backwards == 1:
            before, self._sums = self._sums, [leaf.grad for leaf in self._leaves]
            self._versions = versions_of(self._sums)
            pairs = zip(self._leaves, before, self._sums, strict=False)
            lost = [leaf for leaf, last, now in pairs if last is not None and _is_lost(last, now)]
            if lost:
                self._memory.refuse_touching(lost)
        is_held = bool(self._hooks.leaves or self._narrow or is_watched)
        self.is_steady = not is_held and self._num_backwards > self._looks

    # Leaves that no module lists

    def _notice(self, loss: Tensor) -> None:
        leaves, known = leaves_of(loss), self._parameters.keys() | self._further.keys()
        if self._splits and _has_gone_backward(leaves, known):
            raise LossError(
                "the loss reaches no parameter, but a number with a hook: the forward has called "
                "backward itself, as cached losses do, for the rows of one microbatch. It cuts "
                "batches itself, so pass whole ones: microbatch_size=None"
            )
        if self._outside is None:
            self._outside = OutsideLeaves()
        self._outside.notice(leaves, known)
        if self._outside and self._memory.is_alone and not self._has_restarted:
            hooked = self._outside.with_hooks()
            if hooked:  # their hooks must not run yet
                for leaf in hooked:
                    self._memory.remember(leaf)
                self._restart()

    def _restart(self) -> None:
        # Once per step: a forward that creates new leaves each time would be repeated forever.
        self._has_restarted = True
        raise TouchedGradientsError("the forward uses leaves that are in no module")

    def _take_in(self) -> None:
        """Add leaves that outlived their microbatch, for this attempt and later ones."""
        needs_restart = False
        assert self._outside is not None
        for leaf, gradient in self._outside.take_survivors():
            if gradient is not None and self._attempts > 1 and self._went_unseen:
                refuse_unknown_part()
            self._memory.remember(leaf)
            self._further[id(leaf)] = leaf
            self._leaves.append(leaf)
            if gradient is not None:
                self._earlier.append(_Earlier(leaf, gradient, None, version_of(gradient)))
            self._sums.append(leaf.grad)
            self._versions += versions_of([leaf.grad])
            # Its sum was rounded in each microbatch; the next attempt accumulates it in float32.
            needs_restart |= leaf.dtype in NARROW
        if needs_restart and self._memory.is_alone and not self._has_restarted:
            self._restart()

    # Committing and rolling back

    def prepare(self) -> None:
        self._sums = []  # release the references to gradients
        self._narrow_totals()
        if not (self._earlier or self._hooks.leaves):
            return
        hooked = {id(leaf) for leaf in self._hooks.leaves if leaf.grad is not None}
        copied: set[int] = set()
        delivered: dict[int, Tensor] = {}
        # Removed, so that autograd delivers each total through the hooks, in one piece.
        for leaf in self._hooks.leaves:
            if id(leaf) in hooked:
                assert leaf.grad is not None
                delivered[id(leaf)] = leaf.grad
                leaf.grad = None
        for each in self._earlier:
            leaf = each.leaf
            if id(leaf) in delivered:
                if not each.is_gone:
                    value = self._unshared(each)
                    leaf.grad = torch.zeros_like(value) if each.is_cleared else value.clone()
                    copied.add(id(leaf))
            elif leaf.grad is None:  # the batch did not reach this parameter
                self._keep(each)
            elif each.is_cleared:
                # The forward cleared the earlier gradient, so only that of this batch counts.
                pass
            elif leaf.grad.layout is each.gradient.layout:
                leaf.grad.add_(self._unshared(each))  # into the attempt's own gradient
            else:
                leaf.grad = self._unshared(each) + leaf.grad
        if delivered:
            order = [leaf for leaf in self._hooks.in_order() if id(leaf) in delivered]
            totals = [delivered.pop(id(leaf)) for leaf in order]
            deliver(order, totals)
        self._finals = [
            (each, total)
            for each in self._earlier
            if not each.is_gone
            and (total := each.leaf.grad) is not None
            and total is not each.gradient
            # If a hook cleared or replaced it, that is final.
            and (id(each.leaf) not in hooked or id(each.leaf) in copied)
        ]

    def _unshared(self, each: _Earlier) -> Tensor:
        """Return the values of an earlier gradient, unaffected by writes."""
        return each.gradient if each.copy is None else each.copy

    def _keep(self, each: _Earlier) -> None:
        """Restore an earlier gradient as the forward left it, if the batch added nothing."""
        if not each.is_cleared:
            each.leaf.grad = self._unshared(each)
        elif not each.is_gone:
            each.leaf.grad = torch.zeros_like(each.gradient)

    def commit(self) -> None:
        if not self._earlier:
            self._end()
            return
        if self._memory.writes_to_gradients is None:
            self._memory.writes_to_gradients = False
        # Copying complete totals needs no additional memory and can be repeated.
        _, first = caught(self._copy_totals)
        _, second = (None, None) if first is None else caught(self._copy_totals)
        if second is not None:
            logger.warning("automicro: not all earlier .grad could be kept (%s)", second)
        self._end()
        try:
            for failure in (first, second):
                if failure is not None and classify(failure) is not Failure.RETRYABLE:
                    raise failure
        finally:
            first = second = failure = None  # break the reference cycles with the tracebacks

    def _copy_totals(self) -> None:
        for each, total in self._finals:
            if each.leaf.grad is total:
                each.gradient.copy_(total)
                each.leaf.grad = each.gradient

    def roll_back(self) -> None:
        if not self._begun:
            return
        self._hooks.give_back()
        for leaf in self._leaves:
            leaf.grad = None
        self._narrow_again()
        if self._outside is not None:
            self._outside.roll_back()
        is_lost = False
        for each in self._earlier:
            if each.copy is not None:
                each.gradient.copy_(each.copy)
            elif self._memory.is_alone and version_of(each.gradient) != each.version:
                is_lost = True
            each.leaf.grad = each.gradient
        self._end()
        if is_lost:
            # From now on gradients are copied, so that the next batch can be tried again.
            self._memory.writes_to_gradients = True
            raise _cannot_undo()

    def _end(self) -> None:
        self._earlier, self._leaves = [], []
        self._begun = False
        self._forget()

    # Sums in float32

    def _narrow_again(self) -> None:
        """Reset gradients to the dtype of their parameters, while there are none."""
        for leaf, dtype in self._narrow:
            leaf.grad_dtype = dtype

    def _narrow_totals(self) -> None:
        """Round the sums, one parameter after the other, which avoids a second set."""
        for leaf, dtype in self._narrow:
            # Torch allows setting the dtype only while there is no gradient.
            total, leaf.grad = leaf.grad, None
            leaf.grad_dtype = dtype
            if total is not None:
                leaf.grad = total.to(dtype)


def _has_gone_backward(leaves: Sequence[Tensor], known: Container[int]) -> bool:
    """Whether a loss is detached from its graph, and a hook on it continues the backward."""
    is_cut_off = all(leaf.dim() == 0 and id(leaf) not in known for leaf in leaves)
    return is_cut_off and bool(with_hooks(leaves))


def _is_lost(sum_of_earlier: Tensor, now: Tensor | None) -> bool:
    if now is None:
        return True
    is_plain = now.layout is torch.strided is sum_of_earlier.layout and not now.requires_grad
    return is_plain and now is not sum_of_earlier


def _cannot_undo() -> RollbackError:
    return RollbackError(
        "the forward wrote into .grad tensors of earlier batches, but not in earlier steps, so "
        "this batch cannot be retried. Clear gradients with zero_grad(set_to_none=True) after the "
        "optimizer's step"
    )


def _shares_storage(gradient: Tensor) -> bool:
    if gradient.layout is not torch.strided:
        return False
    # A bucket of a single parameter is no larger than its view.
    is_part = gradient.untyped_storage().nbytes() != gradient.numel() * gradient.element_size()
    return is_part or is_view(gradient)
