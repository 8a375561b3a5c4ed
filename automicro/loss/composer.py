"""Models with Composer's interface, which compute their own losses and metrics."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from automicro.batch.tensors import map_tensors
from automicro.errors import LossError
from automicro.loss.conventions import Convention, Output, named, summed


class ComposerModel(Convention):
    """A model with Composer's ``loss`` and ``eval_forward``."""

    has_eval_forward = True

    def __init__(self, model: Any) -> None:
        self._model = model

    def _call(self, model: nn.Module, microbatch: Any) -> Any:
        # Keep what forward removes from the batch for eval_forward, but not for the loss.
        seen = map_tensors(microbatch, lambda tensor: tensor, isolate=True)
        return model(seen), seen

    def _read(self, given: Any) -> Output:
        """Read the loss that Composer would train on: ``total``, or else the sum of all losses."""
        outputs, seen = given
        result = self._model.loss(outputs, seen)
        if isinstance(result, list | tuple) and result:
            result = {f"loss{index}": each for index, each in enumerate(result)}
        if not isinstance(result, Mapping):
            return Output(self._average(result), outputs=outputs)
        losses = {str(name): self._average(value) for name, value in result.items()}
        # If there is a total, Composer trains only on it.
        if (total := losses.pop("total", None)) is not None:
            return Output(total, losses, outputs, has_total=True)
        if "loss" in losses and len(losses) > 1:
            raise LossError(
                f"{type(self._model).__name__}.loss returned {named(result)}: Composer adds up "
                "all of them, but elsewhere 'loss' is already the total; name the total 'total', "
                "so that only it is trained on, or give the part 'loss' another name"
            )
        if not losses:
            raise LossError(f"{type(self._model).__name__}.loss returned no loss: {result!r}")
        return summed(losses, outputs)

    def _average(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor):
            raise LossError(
                f"{type(self._model).__name__}.loss returned {named(loss)} instead of a loss; "
                "return a tensor, several of them in a list, or a mapping from names to tensors"
            )
        return loss if loss.dim() == 0 else loss.mean()  # one loss per row

    def evaluate(self, model: nn.Module, microbatch: Any) -> Output:
        return Output(None, outputs=self.predict(model, microbatch))

    def predict(self, model: nn.Module, microbatch: Any, *, holds_rows: bool = False) -> Any:
        # Composer models compute no loss in evaluation, because their metrics do.
        return self._model.eval_forward(microbatch)

    def eval_forward(self, microbatch: Any, outputs: Any) -> Any:
        return self._model.eval_forward(microbatch, outputs)

    def update_metric(self, metric: Any, outputs: Any, microbatch: Any) -> None:
        if callable(getattr(self._model, "update_metric", None)):
            self._model.update_metric(microbatch, outputs, metric)
        else:
            super().update_metric(metric, outputs, microbatch)
