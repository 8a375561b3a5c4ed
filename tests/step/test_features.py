"""User-defined features, policies and metrics: the hooks they receive, and their errors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MeanSquaredError

from automicro import Feature, Microbatcher, MicrobatchRun, Policy, Trainer
from automicro.errors import SampleTooLargeError
from automicro.policy.policy import Outcome


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3), torch.randn(rows, 2)


class Fails(Feature):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def before_backward(self, run: MicrobatchRun) -> None:
        raise self.error


def test_error_in_feature_names_feature() -> None:
    for error, kind in ((KeyError("mine"), KeyError), (MemoryError(), SampleTooLargeError)):
        mb = Microbatcher(nn.Linear(3, 2), loss_fn=nn.MSELoss(), features=[Fails(error)])
        with pytest.raises(kind) as caught:
            mb.backward(batch())
        notes = [*getattr(caught.value, "__notes__", ()), str(caught.value)]
        assert any("the feature Fails" in each for each in notes)


class Misnamed(Feature):
    def before_backwards(self, run: MicrobatchRun) -> None:
        """A misspelled hook, which would never be called."""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"features": [Misnamed()]}, r"Misnamed.before_backwards would never be called"),
        ({"features": "recompute"}, "features is a str"),
        ({"metrics": MeanMetric()}, r"backward\(batch, metrics\)"),
    ],
)
def test_arguments_without_effect_raise_type_error(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Microbatcher(nn.Linear(3, 2), loss_fn=nn.MSELoss(), **arguments)


def test_incomplete_transaction_part_raises_type_error() -> None:
    class Holds(Feature):
        def parts(self) -> list[Any]:
            return [Lacking()]

    class Lacking:
        begin = commit = roll_back = print

    microbatcher = Microbatcher(nn.Linear(3, 2), loss_fn=nn.MSELoss(), features=[Holds()])
    with pytest.raises(TypeError, match=r"Lacking.*lacks prepare. Return objects that have begin"):
        microbatcher.backward((torch.ones(2, 3), torch.ones(2, 2)))


def test_unknown_argument_error_suggests_equivalent() -> None:
    with pytest.raises(TypeError, match="no argument epochs; give max_duration='3ep'"):
        Trainer(nn.Linear(3, 2), [], epochs=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes model alone by place; name all others, as in loss"):
        Microbatcher(nn.Linear(3, 2), nn.MSELoss())  # type: ignore[call-arg]


def test_metric_lists_are_accepted_but_metric_classes_are_rejected() -> None:
    metrics = [MeanSquaredError(), MeanSquaredError()]
    mb = Microbatcher(nn.Linear(3, 2), loss_fn=nn.MSELoss(), eval_microbatch_size=3)
    result = mb.evaluate(batch(), metrics)
    assert [each.compute().item() for each in metrics] == [
        pytest.approx(float(result.loss or 0))
    ] * 2
    with pytest.raises(TypeError, match=r"holds the class MeanSquaredError\. Pass an instance"):
        mb.evaluate(batch(), MeanSquaredError)


class Quarters(Policy):
    def __init__(self) -> None:
        self.parts = 1

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        self.multiple_of = 1 if num_rows < 100 else 52
        return -(-num_rows // self.parts)

    def record(self, outcome: Outcome) -> None:
        self.parts = self.parts if outcome.fits else self.parts * 4


def forward(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss; batches that contain 100 run out of memory at every size."""
    if bool((microbatch[0] == 100).any()):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return nn.functional.mse_loss(model(microbatch[0]), microbatch[1])


def test_custom_policy_state_is_restored_after_impossible_batch() -> None:
    policy, other = Quarters(), Quarters()
    mb = Microbatcher(
        nn.Linear(3, 2),
        forward=forward,
        loss_average="samples",
        probe=False,
        microbatch_size=policy,
    )
    mb.backward(batch())
    with pytest.raises(SampleTooLargeError, match=r"(?s)gradients of earlier batches.*zero_grad"):
        mb.backward((torch.full((8, 3), 100.0), torch.randn(8, 2)))
    assert policy.parts == 1
    policy.parts = 4
    other.load_state_dict(policy.state_dict())
    assert other.parts == 4


class Sizes(Feature):
    def __init__(self) -> None:
        self.seen = list[int]()

    def before(self, run: MicrobatchRun) -> None:
        self.seen.append(run.num_rows)


def test_policy_sets_size_multiple_when_proposing() -> None:
    policy, sizes = Quarters(), Sizes()
    policy.parts = 3
    mb = Microbatcher(
        nn.Linear(3, 2),
        loss_fn=nn.MSELoss(),
        microbatch_size=policy,
        probe=False,
        features=[sizes],
    )
    mb.backward(batch(310))
    assert sizes.seen == [104, 104, 102]
