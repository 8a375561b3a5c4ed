"""What every part of a run works with: one object, handed to each."""

from dataclasses import dataclass
from typing import Any

import torch

from automicro.events.callback import Callbacks
from automicro.events.run import LoopState, Run
from automicro.ranks.interface import Ranks
from automicro.trainer.recording import Recorder


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """A run, whoever listens to it, and whoever takes part.

    Attributes:
        run: as callbacks see it: read-only, with their requests.
        state: where training stands; its parts write it.
        callbacks: told of every event.
        recorder: logs the numbers.
        ranks: all that train the model.
    """

    run: Run
    state: LoopState
    callbacks: Callbacks
    recorder: Recorder
    ranks: Ranks

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.run.device

    @property
    def has_peers(self) -> bool:
        """Whether other ranks train the same model."""
        return self.ranks.world_size > 1

    def tell(self, event: str, *subject: Any) -> None:
        """Tell callbacks of an event."""
        self.callbacks.fire(event, self.run, *subject)
