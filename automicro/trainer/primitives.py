"""The `Microbatcher` of a trainer, and further ones of the same model and options."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automicro.checks import unwrapped
from automicro.compilation import compile_model
from automicro.microbatcher import Microbatcher
from automicro.optimization import GradientScaler
from automicro.policy import Policy, make_policy


class Primitives:
    """Makes microbatchers of one model, compiled where that is asked for.

    Args:
        modules: the model, then further modules that take part.
        device: where they are.
        microbatch_size: of training.
        eval_microbatch_size: of evaluation.
        compile: whether to compile the model, or how.
        memory_limit: of the device, which on a CPU rules compiling out.
        options: of `Microbatcher`, for all.

    Raises:
        TypeError, ValueError: options that make no sense, each with its remedy.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        device: torch.device,
        microbatch_size: int | str | Policy | None,
        eval_microbatch_size: int | str | Policy | None,
        compile: bool | Mapping[str, Any],
        memory_limit: str | int | float | None,
        options: Mapping[str, Any],
    ) -> None:
        self.policies = (
            make_policy(microbatch_size),
            make_policy(eval_microbatch_size, name="eval_microbatch_size"),
        )
        compile_model(
            unwrapped(modules[0]),
            compile,
            sizes_change=any(policy.adapts for policy in self.policies),
            device=device,
            memory_limit=memory_limit,
        )
        self.scaler: GradientScaler | None = None  # made with the first microbatcher
        self._device = device
        self._is_scaled = options["precision"] == "fp16"
        self._model = modules[0]
        self._options = {
            **options,
            "modules": modules[1:],
            "device": device,
            "backward": self._backward if self._is_scaled else None,
        }

    def make_for_callback(self, **options: Any) -> Microbatcher:
        """A microbatcher for passes of a callback's own: unscaled, and nobody remembers its sizes.

        Args:
            options: of `Microbatcher`, in place of the trainer's.
        """
        return self.make(**{"backward": Tensor.backward, "remember_sizes": False, **options})

    def make(self, **options: Any) -> Microbatcher:
        """A microbatcher of the model.

        Args:
            options: of `Microbatcher`, in place of the trainer's.
        """
        microbatcher = Microbatcher(self._model, **{**self._options, **options})
        if self._is_scaled and self.scaler is None:
            self.scaler = GradientScaler(self._device, ranks=microbatcher.ranks)
        return microbatcher

    def _backward(self, loss: Tensor) -> None:
        assert self.scaler is not None
        self.scaler.backward(loss)
