"""User-defined features, policies and metrics: the hooks they receive, and their errors."""

from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError

from automicro import Feature, Microbatcher, Policy, Trainer
from automicro.errors import SampleTooLargeError


def batch(rows=8):
    return torch.randn(rows, 3), torch.randn(rows, 2)


def made(**options: Any) -> Microbatcher:
    return Microbatcher(nn.Linear(3, 2), **{"loss_fn": nn.MSELoss(), "probe": False, **options})


class Fails(Feature):
    def __init__(self, error):
        self.error = error

    def before_backward(self, run):
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"), [(KeyError("mine"), KeyError), (MemoryError(), SampleTooLargeError)]
)
def test_error_in_feature_names_feature(error, kind):
    with pytest.raises(kind) as caught:
        made(features=[Fails(error)]).backward(batch())
    notes = [*getattr(caught.value, "__notes__", ()), str(caught.value)]
    assert any("the feature Fails" in each for each in notes)


class Misnamed(Feature):
    def before_backwards(self, run):
        raise AssertionError


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"features": [Misnamed()]}, r"Misnamed.before_backwards would never be called"),
        ({"features": "recompute"}, "features is a str"),
        ({"metrics": MeanMetric()}, r"backward\(batch, metrics\)"),
    ],
)
def test_arguments_without_effect_raise_type_error(arguments, words):
    with pytest.raises(TypeError, match=words):
        made(**arguments)


def test_incomplete_transaction_part_raises_type_error():
    class Lacking:
        begin = commit = roll_back = print

    class Holds(Feature):
        def parts(self):
            return [Lacking()]

    with pytest.raises(TypeError, match=r"Lacking.*lacks prepare. Return objects that have begin"):
        made(features=[Holds()]).backward(batch())


def test_unknown_argument_error_suggests_equivalent():
    with pytest.raises(TypeError, match="no argument epochs; give max_duration='3ep'"):
        Trainer(nn.Linear(3, 2), [], epochs=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes model alone by place; name all others, as in loss"):
        Microbatcher(nn.Linear(3, 2), nn.MSELoss())  # type: ignore[call-arg]


def test_metric_lists_are_accepted_but_metric_classes_are_rejected():
    metrics, microbatcher = [MeanSquaredError(), MeanSquaredError()], made(eval_microbatch_size=3)
    result: Any = microbatcher.evaluate(batch(), metrics)
    assert [each.compute().item() for each in metrics] == [pytest.approx(float(result.loss))] * 2
    with pytest.raises(TypeError, match=r"holds the class MeanSquaredError\. Pass an instance"):
        microbatcher.evaluate(batch(), MeanSquaredError)


class Quarters(Policy):
    def __init__(self, parts=1):
        self.parts = parts

    def propose(self, num_rows, cost=None):
        self.multiple_of = 1 if num_rows < 100 else 52
        return -(-num_rows // self.parts)

    def record(self, outcome):
        self.parts = self.parts if outcome.fits else self.parts * 4


def test_custom_policy_state_is_restored_after_impossible_batch():
    def forward(model, microbatch):
        if bool((microbatch[0] == 100).any()):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return nn.functional.mse_loss(model(microbatch[0]), microbatch[1])

    policy, other = Quarters(), Quarters()
    microbatcher = made(
        loss_fn=None, forward=forward, loss_average="samples", microbatch_size=policy
    )
    microbatcher.backward(batch())
    with pytest.raises(SampleTooLargeError, match=r"(?s)gradients of earlier batches.*zero_grad"):
        microbatcher.backward((torch.full((8, 3), 100.0), torch.randn(8, 2)))
    assert policy.parts == 1
    policy.parts = 4
    other.load_state_dict(policy.state_dict())
    assert other.parts == 4


class Sizes(Feature):
    def __init__(self):
        self.seen = list[int]()

    def before(self, run):
        self.seen.append(run.num_rows)


def test_policy_sets_size_multiple_when_proposing():
    sizes = Sizes()
    made(microbatch_size=Quarters(3), features=[sizes]).backward(batch(310))
    assert sizes.seen == [104, 104, 102]
