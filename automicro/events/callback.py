"""The events of a run, as the methods of whoever listens to them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automicro.events.run import Run
from automicro.observer import Attempt, Microbatch, OutOfMemory, Resize
from automicro.results import EvalResult, StepResult
from automicro.showing import one_line


class Callback:
    """Does something of its own at events of a run. Override the methods of those.

    What an event hands over is to be read and not to be changed; what a callback may ask for is
    in `Run`. An exception ends the run, with a note that names the callback and the event.

    ``fit_start`` · ``epoch_start`` · ``batch_start`` · [``attempt_start`` ·
    [``microbatch_start`` · ``forward_start`` · ``forward_end`` · ``loss_start`` · ``loss_end`` ·
    ``backward_start`` · ``backward_end`` · ``microbatch_end``] for each microbatch ·
    ``attempt_end``] · ``batch_end`` · ``epoch_end`` · ``fit_end``. Where memory runs out,
    ``attempt_end`` is missing, ``oom`` and ``resize`` follow, and the next ``attempt_start`` has
    the number 2. An evaluation is ``eval_start`` · [``eval_batch_start`` · the same attempts, with
    no backward · ``eval_batch_end``] · ``eval_end``.

    Inside an attempt, what happens may be undone: count and keep at ``batch_end``. A forward and
    backward of one's own goes through a `Microbatcher` (`Run.microbatcher`), which survives
    running out of memory, at ``batch_start``, ``batch_end`` or later ones.

    Example:
        >>> class CountRetries(Callback):
        ...     retries = 0
        ...
        ...     def batch_end(self, run, result):
        ...         self.retries += result.ooms
    """

    def __repr__(self) -> str:
        return one_line(self)

    def fit_start(self, run: Run) -> None:
        """Training begins, or goes on after an interruption."""

    def fit_end(self, run: Run) -> None:
        """Training has ended, after the last evaluation. Not called after an error."""

    def epoch_start(self, run: Run) -> None:
        """A pass over the data begins."""

    def epoch_end(self, run: Run) -> None:
        """A pass over the data is complete; its metrics are in ``run.state.train.metrics``."""

    def transform(self, run: Run, batch: Any) -> Any:
        """The batch to train on in place of this one, before anything else sees it."""
        return batch

    def batch_start(self, run: Run, batch: Any) -> None:
        """An optimization batch is about to be trained on.

        With ``accumulate_batches`` it is a list of what the loader gave. Of several ranks, one
        whose data have run out is not told, so a collective belongs into `batch_end`.
        """

    def batch_end(self, run: Run, result: StepResult) -> None:
        """The optimizer has stepped, or the batch was skipped; gradients are cleared."""

    def gradients_ready(self, run: Run, result: StepResult) -> None:
        """``.grad`` holds the whole batch's gradient, unscaled; clipping comes next."""

    def attempt_start(self, run: Run, attempt: Attempt) -> None:
        """A try at a batch begins."""

    def attempt_end(self, run: Run, attempt: Attempt) -> None:
        """All microbatches of a try went through; it is about to be committed."""

    def microbatch_start(self, run: Run, microbatch: Microbatch) -> None:
        """A microbatch is on the device."""

    def microbatch_end(self, run: Run, microbatch: Microbatch) -> None:
        """A microbatch is done."""

    def forward_start(self, run: Run, microbatch: Microbatch) -> None:
        """The model is about to be called."""

    def forward_end(self, run: Run, microbatch: Microbatch) -> None:
        """The model has been called."""

    def loss_start(self, run: Run, microbatch: Microbatch) -> None:
        """The loss is about to be computed; where the model computes it, it has been."""

    def loss_end(self, run: Run, microbatch: Microbatch) -> None:
        """``microbatch.loss`` is the microbatch's share of the batch's loss."""

    def backward_start(self, run: Run, microbatch: Microbatch) -> None:
        """The backward is about to run."""

    def backward_end(self, run: Run, microbatch: Microbatch) -> None:
        """The microbatch's gradient has been added."""

    def oom(self, run: Run, failure: OutOfMemory) -> None:
        """A try ran out of memory and was undone."""

    def resize(self, run: Run, resize: Resize) -> None:
        """The microbatch size changes."""

    def eval_start(self, run: Run) -> None:
        """An evaluation begins; the model is still as in training."""

    def eval_batch_start(self, run: Run, batch: Any) -> None:
        """A batch is about to be evaluated."""

    def eval_batch_end(self, run: Run, result: EvalResult) -> None:
        """A batch has been evaluated."""

    def eval_end(self, run: Run, values: Mapping[str, float]) -> None:
        """An evaluation is complete: loss and metrics by name, as they are logged."""

    def checkpoint_start(self, run: Run) -> None:
        """A checkpoint is about to be made of the state as it is."""

    def checkpoint_end(self, run: Run, path: Path) -> None:
        """A checkpoint was made; where it is written in the background, not yet there."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
