"""What is known of a model's gradients from one batch to the next."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from automicro.errors import GradientWarning
from automicro.torch_private import node_hooks, with_hooks
from automicro.warn import warn

_LOOKED_BATCHES = (1, 2, 4, 8)
_LOOKED_MICROBATCHES = 4


class TouchedGradientsError(Exception):
    """The same attempt has to be made again, more carefully. It reaches nobody outside a step."""


class GradientMemory:
    """What was learned of the gradients of one model.

    Args:
        modules: everything that takes part, for names.
        sums_in_float32: whether parameters in bf16 or fp16 add up in float32.
        is_alone: whether there are no other ranks, whose wrappers have ways of their own.
        can_look: whether the leaves of a loss can be told: not where a model is sharded.

    Attributes:
        is_touched: whether the forward sees or clears gradients, so that they are kept from it.
        writes_to_gradients: whether the forward writes into the gradients of earlier batches;
            None where that is not known yet.
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
        self.is_touched = False
        self.writes_to_gradients: bool | None = None
        self._modules = modules
        self._can_look = can_look
        self._outside: list[TensorWeakRef] = []
        self._known: list[int] = []
        self._num_batches = 0
        self._has_looked_at_nodes = False
        self._told: set[str] = set()

    def next_batch(self, ids: list[int]) -> None:
        """A new batch begins, for parameters of these ids."""
        self._num_batches += 1
        if ids != self._known:  # layers were added, or replaced
            self._known = ids
            self._num_batches = 1
            self._has_looked_at_nodes = False

    def num_looks(self, *, is_retry: bool) -> int:
        """Of how many microbatches to look which leaves their losses reach."""
        looks = is_retry or self._num_batches in _LOOKED_BATCHES
        return _LOOKED_MICROBATCHES if looks and self._can_look else 0

    def outside(self) -> list[Tensor]:
        """Leaves that losses have reached although no module lists them."""
        self._outside = [each for each in self._outside if each() is not None]
        return [leaf for each in self._outside if (leaf := each()) is not None]

    def remember(self, leaf: Tensor) -> None:
        """Know one more of these."""
        self._outside.append(TensorWeakRef(leaf))

    def look_at_nodes(self, leaves: Iterable[Tensor]) -> None:
        """Warn, once, of hooks that cannot be kept from running.

        Warns:
            GradientWarning
        """
        if self._has_looked_at_nodes:
            return
        self._has_looked_at_nodes = True
        found = [leaf for leaf in leaves if leaf.requires_grad and node_hooks(leaf)]
        if found:
            self._tell(
                f"hooks on the AccumulateGrad node of {self._names(found)} see the gradient of "
                "every microbatch and not that of the whole batch; register them on the parameter "
                "itself (register_hook, register_post_accumulate_grad_hook), whose hooks run "
                "once, or keep batches whole with microbatch_size=None"
            )

    def warn_of_hooks(self, leaves: Iterable[Tensor]) -> None:
        """Warn, once, of hooks on several ranks, where they see parts.

        Warns:
            GradientWarning
        """
        if "ranks" in self._told:
            return
        found = with_hooks(leaves)
        if found:
            self._told.add("ranks")
            self._tell(
                f"hooks on {self._names(found)} see the gradient of every microbatch and not that "
                "of the whole batch, because on several ranks the wrapper of the model adds up; "
                "clip or change gradients between backward() and the optimizer's step"
            )

    def warn_of_late_hooks(self, leaves: Iterable[Tensor], held: Iterable[Tensor]) -> None:
        """Warn, once, of hooks that the forward itself registered.

        Warns:
            GradientWarning
        """
        if "late" in self._told:
            return
        known = set(map(id, held))
        found = [leaf for leaf in with_hooks(leaves) if id(leaf) not in known]
        if found:
            self._told.add("late")
            self._tell(
                f"the forward registers hooks on {self._names(found)}: one for every microbatch, "
                "and they see parts of the gradient; register them once, before training"
            )

    @property
    def could_warn_of_backward(self) -> bool:
        """Whether nobody has been told yet."""
        return "backward" not in self._told

    def warn_of_backward(self, leaves: Iterable[Tensor]) -> None:
        """Warn, once, of a backward inside the forward whose gradients stay.

        Warns:
            GradientWarning
        """
        self._told.add("backward")
        self._tell(
            f"the forward runs a backward of its own and leaves its gradient in .grad, for "
            f"{self._names(leaves)}. Each microbatch adds its own, weighted as "
            "its loss is, which is right only if that backward averages over the same as the "
            "loss. Return its loss as a part of the loss; or, where the gradient is not meant to "
            "count, use torch.autograd.grad or clear it (model.zero_grad())"
        )

    def _tell(self, text: str) -> None:
        warn(text, GradientWarning)

    def _names(self, leaves: Iterable[Tensor]) -> str:
        named = {id(p): name for module in self._modules for name, p in module.named_parameters()}
        names = [repr(named.get(id(leaf), "a tensor outside of the model")) for leaf in leaves]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(dict.fromkeys(names[:3])) + more
