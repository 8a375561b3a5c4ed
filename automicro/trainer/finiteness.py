"""What to do about a batch whose loss, or the norm of its gradient, is NaN or infinite."""

import math
from collections.abc import Callable

from torch import Tensor

from automicro.errors import NonFiniteLossError
from automicro.events.state import LoopState
from automicro.trainer.lines import count_of

NON_FINITE_MODES = ("stop", "skip", "ignore")
MOST_IN_A_ROW = 50  # a model whose weights are NaN never recovers


class FinitenessGuard:
    """Stops at a batch that is not finite, skips it, or lets it pass.

    Args:
        mode: one of `NON_FINITE_MODES`.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._in_a_row = 0

    @property
    def decides(self) -> bool:
        """Whether anything depends on the loss of a batch being finite."""
        return self._mode != "ignore"

    @property
    def accept(self) -> Callable[[Tensor], bool] | None:
        """Whether a batch with this loss may leave a trace: in BatchNorm's statistics, say.

        None where every batch may. Reading the loss waits for the device.
        """
        return _is_finite if self.decides else None

    def object_to(self, loss: float, norm: float | None, state: LoopState) -> str | None:
        """None where the optimizer may step, else what is not finite, in words.

        Args:
            loss: of the batch.
            norm: of its gradient, where that was computed and has to be finite.
            state: where training stands, with the batch still to be counted.

        Raises:
            NonFiniteLossError: the mode is "stop", or too many batches were skipped in a row.
        """
        if not self.decides:
            return None
        what = _describe(loss, norm)
        if what is None:
            return None
        if self._mode == "skip":
            return self._skip(what, state)
        raise NonFiniteLossError(
            f"{what} {_where(state)}; the optimizer did not step. Lower the learning rate, warm "
            "it up, clip gradients (grad_clip_norm=1.0), look for NaN and infinite values in this "
            "batch, or leave such batches out with non_finite='skip'"
        )

    def object_to_overflow(self, state: LoopState) -> str:
        """What to say of a batch whose gradients overflowed in half precision.

        The scale of the loss is lowered then, so it is no error unless it goes on for long.

        Raises:
            NonFiniteLossError: too many batches were skipped in a row.
        """
        return self._skip("gradients overflowed, so the scale of the loss was lowered", state)

    def take_note_of_step(self) -> None:
        """The optimizer has stepped: the model is not lost."""
        self._in_a_row = 0

    def _skip(self, what: str, state: LoopState) -> str:
        self._in_a_row += 1
        if self._in_a_row <= MOST_IN_A_ROW:
            return f"{what} {_where(state)}"
        raise NonFiniteLossError(
            f"{what} {_where(state)}, as in the {MOST_IN_A_ROW} batches before it, which were "
            "skipped; the weights themselves may be NaN or infinite. Go on from an earlier "
            "checkpoint with a lower learning rate, or clip gradients (grad_clip_norm=1.0)"
        )


def _is_finite(loss: Tensor) -> bool:
    return math.isfinite(loss.item())


def _where(state: LoopState) -> str:
    return (
        f"in epoch {state.epoch + 1}, batch {state.epoch_batch + 1} of the epoch "
        f"({count_of(state.batch, 'batch')} done)"
    )


def _describe(loss: float, norm: float | None) -> str | None:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if norm is not None and not math.isfinite(norm):
        return f"the loss is {loss:.6g}, but the norm of its gradient is {norm}"
    return None
