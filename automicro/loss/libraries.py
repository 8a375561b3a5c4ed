"""Models of other libraries: Composer's interface, and what Hugging Face's say of their loss."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from automicro.batch.tensors import map_tensors
from automicro.errors import LossError
from automicro.loss.averages import Average, Samples, Sum, Tokens
from automicro.loss.conventions import Convention, Output, named, summed


class ComposerModel(Convention):
    """A model with Composer's ``loss`` and ``eval_forward``."""

    has_eval_forward = True

    def __init__(self, model: Any) -> None:
        self._model = model

    def call(self, model: nn.Module, microbatch: Any) -> Any:
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


_OVER_TARGETS = {
    *(f"For{what}Classification" for what in ("Token", "Sequence", "Image", "Video", "Audio")),
    "ForMaskedLM",
}


def read_transformers(model: nn.Module, targets: Callable[[Any], Any]) -> Average | None:
    """Infer the average from the loss type that a Hugging Face model declares."""
    # A language model without a loss type has the default, a causal loss, as transformers documents
    # it. Causal models shift their labels by one; encoder-decoder models and token classifiers do
    # not. Checks find models whose loss differs.
    # Check the class first, because a model without a loss type logs when the instance is accessed.
    if not (hasattr(type(model), "loss_function") or hasattr(model, "loss_function")):
        return None
    # Only Hugging Face models have these attributes.
    config = getattr(model, "config", None)
    loss_type = getattr(model, "loss_type", None)
    get_head: Any = getattr(model, "get_output_embeddings", None)
    if loss_type is None and isinstance(get_head and get_head(), nn.Module):
        loss_type = "ForConditionalGeneration"
    match loss_type:
        case "ForCausalLM" | "ForConditionalGeneration":
            stays = loss_type != "ForCausalLM" and getattr(config, "is_encoder_decoder", False)
            return Tokens(targets, shift=0 if stays else 1, is_claimed=True)
        case "ForSemanticSegmentation":
            return Tokens(targets, ignore_index=255)
        case "ForCTC":
            reduction = getattr(config, "ctc_loss_reduction", None)
            return Sum() if reduction == "sum" else Samples() if reduction == "mean" else None
    return Tokens(targets) if loss_type in _OVER_TARGETS else None
