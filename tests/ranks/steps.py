"""Steps of the real `Microbatcher` on several ranks that run out of memory as planned."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automicro import Microbatcher, Observing
from automicro.features import with_features
from automicro.policy.policy import Outcome, Policy
from automicro.ranks.coordinated import CoordinatedRanks
from automicro.ranks.interface import Sync
from automicro.step.results import StepResult
from tests.ranks.faulty_models import Faults
from tests.ranks.wrapping import local

ROWS = 32


class HalvingOnly(Policy):
    """Halves failed sizes down to one row and retries there, because planned faults happen once."""

    def __init__(self, size: int, sizes: Sequence[int] = ()) -> None:
        self.size = size
        self.forced = list(sizes)
        self.outcomes: list[Outcome] = []

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return min(self.forced[0] if self.forced else self.size, num_rows)

    def record(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if outcome.fits:
            del self.forced[:1]
        else:
            self.size = max(1, outcome.microbatch_size // 2)

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.size = state["size"]


class Stepper:
    """A model with its optimizer, and the records of their steps."""

    def __init__(
        self,
        model: nn.Module,
        faults: Faults,
        *,
        size: int = ROWS // 2,
        sizes: Sequence[int] = (),
        syncs: Sequence[Sync] = (),
        policy: Policy | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.faults = faults
        self.policy = policy or HalvingOnly(size, sizes)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.microbatcher = another(
            model,
            microbatch_size=self.policy,
            eval_microbatch_size=self.policy if policy is None else "auto",
            optimizer=self.optimizer,
            **{**options, "features": [Observing(self.observe), *options.get("features", [])]},
        )
        self.sizes: list[int] = []
        self.forced_syncs = syncs
        self.syncs: list[Sync] = []
        self.attempts = 0
        self.votes: list[int] = []
        self.losses: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def observe(self, event: str, subject: Any) -> None:
        if event == "attempt_start":
            self.faults.microbatch = 0
            self.faults.reach("before")
        elif event == "microbatch_start":
            self.faults.microbatch = subject.index
            self.faults.reach("between")
        elif event == "attempt_end":
            self.faults.reach("end")

    def train(self, step: int, batch: Any) -> StepResult:
        self.faults.step = step
        before = self.count_votes()
        ranks = self.microbatcher.ranks
        if self.forced_syncs and isinstance(ranks, CoordinatedRanks):
            ranks.sync = self.forced_syncs[step]
        result = self.microbatcher.backward(batch)
        self.votes.append(self.count_votes() - before)
        self.sizes.append(result.microbatch_size)
        if isinstance(ranks, CoordinatedRanks):
            self.syncs.append(ranks.synced)
        self.attempts += result.attempts
        self.losses.append(result.loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result

    def evaluate(self, step: int, batch: Any) -> None:
        self.faults.step = step
        result = self.microbatcher.evaluate(batch, return_outputs=True)
        self.sizes.append(result.microbatch_size)
        self.attempts += result.attempts
        if result.outputs is not None:
            self.outputs.append(result.outputs)

    def state(self) -> dict[str, Tensor]:
        """Return all state on this rank that affects further steps, and earlier results."""
        found = {name: local(each.detach()) for name, each in self.model.named_parameters()}
        found |= dict(self.model.named_buffers())
        for index, slots in enumerate(self.optimizer.state.values()):
            found |= {f"optimizer.{index}.{name}": local(value) for name, value in slots.items()}
        found |= {f"outputs.{index}": each for index, each in enumerate(self.outputs)}
        return found | {"rng": torch.get_rng_state(), "losses": torch.stack(self.losses)}

    def count_votes(self) -> int:
        ranks = self.microbatcher.ranks
        return ranks.num_votes if isinstance(ranks, CoordinatedRanks) else 0


def another(model: nn.Module, **options: Any) -> Microbatcher:
    """Return a new Microbatcher for a model."""
    defaults: dict[str, Any] = {
        "loss_average": "samples",
        "microbatch_size": 4,
        "eval_microbatch_size": 4,
        "batchnorm": "ignore",
        "probe": False,
    }
    if "forward" not in options:
        defaults["loss_fn"] = squared_error
    return Microbatcher(model, **with_features(defaults | options))


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.to(targets.dtype) - targets).square().sum(1).mean()
