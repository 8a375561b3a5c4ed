"""Outputs of training steps, and recurrent state carried from batch to batch."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from automicro import (
    BatchError,
    LossError,
    MemoryBudget,
    MetricWarning,
    Microbatcher,
    Observing,
    SampleTooLargeError,
)
from automicro.features import Carry, UpdateMetric
from automicro.step.events import Microbatch

ROWS, STEPS, FEATURES = 6, 5, 3


def classifier() -> Any:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()


def pair(rows=ROWS):
    return torch.randn(rows, FEATURES).double(), torch.arange(rows) % 2


def with_outputs(**others: Any) -> Any:
    """Return a forward that returns outputs, some of them functions of the batch and the logits."""

    def forward(model, batch):
        outputs = model(batch[0])
        names = [f"row {int(10 * value)}" for value in batch[0][:, 0]]
        more = {name: make(batch, outputs) for name, make in others.items()}
        loss = nn.functional.cross_entropy(outputs, batch[1])
        return {"loss": loss, "a": outputs, "names": names, **more}

    return forward


def returning(forward: Any, size: Any = 2, model: Any = None, **options: Any) -> Microbatcher:
    sizes = {"microbatch_size": size, "eval_microbatch_size": size}
    return Microbatcher(model or classifier(), forward=forward, **sizes, **options)


@pytest.mark.parametrize("where", [True, "host", "device"])
@pytest.mark.parametrize("size", [6, 4])
def test_outputs_of_all_rows_are_returned_in_order(size, where):
    batch, model = pair(), classifier().eval()
    microbatcher = returning(with_outputs(), size, model, loss_average="samples")
    outputs = microbatcher.backward(batch, return_outputs=where).outputs
    assert list(outputs) == ["a", "names"]
    assert not outputs["a"].requires_grad
    torch.testing.assert_close(outputs["a"], model(batch[0]))
    assert outputs["names"] == with_outputs()(model, batch)["names"]


def test_outputs_of_failed_attempt_are_discarded():
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    batch = torch.randn(256, 64), torch.randint(10, (256,))
    with MemoryBudget("1MiB"):
        microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss())
        result = microbatcher.backward(batch, return_outputs="host")
    assert result.ooms > 0
    torch.testing.assert_close(result.outputs, model(batch[0]).detach())


def test_outputs_kept_on_device_use_device_memory():
    model, batch = nn.Linear(4, 1024), (torch.randn(256, 4), torch.zeros(256, 1024))

    def fewest(where, limit="2400KiB"):
        with MemoryBudget(limit):
            microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), probe=False)
            return microbatcher.backward(batch, return_outputs=where).num_microbatches

    assert fewest("device") > fewest("host") >= fewest(False)
    named = r"the joining of outputs of all rows \(return_outputs='host'\) at every size"
    with pytest.raises(SampleTooLargeError, match=named):
        fewest("device", "1700KiB")


def test_outputs_of_accumulated_batches_are_concatenated():
    model, batches = classifier().eval(), [pair(4), pair(2), pair(5)]
    microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), microbatch_size=2)
    outputs = microbatcher.accumulate(batches, return_outputs=True).outputs
    torch.testing.assert_close(outputs, model(torch.cat([inputs for inputs, _ in batches])))


@pytest.mark.parametrize("size", [6, 2])
def test_outputs_that_cannot_be_joined_raise_at_any_size(size):
    def forward(model, batch):
        outputs = model(batch[0])
        return nn.functional.cross_entropy(outputs, batch[1]), (outputs, outputs.detach().mean())

    microbatcher = returning(forward, size, loss_average="samples")
    with pytest.raises(BatchError, match=r"'1' is a 0-d Tensor .* Return one value per row"):
        microbatcher.backward(pair(), return_outputs=True)
    microbatcher.backward(pair())


def test_numeric_outputs_of_evaluation_require_whole_batch():
    forward = with_outputs(count=lambda batch, _: len(batch[0]), share=lambda *_: 0.5)
    outputs = returning(forward, None).evaluate(pair(), return_outputs=True).outputs
    assert (outputs["count"], outputs["share"], len(outputs["a"])) == (ROWS, 0.5, ROWS)
    with pytest.raises(BatchError, match="'count' is of type int"):
        returning(forward, 4).evaluate(pair(), return_outputs=True)


def confusion(batch, outputs):
    places = batch[1], outputs.argmax(1)
    return torch.zeros(2, 2).index_put_(places, torch.ones(len(batch[1])), accumulate=True)


@pytest.mark.parametrize(
    ("work", "size", "rows", "make", "named"),
    [
        ("backward", 4, 7, confusion, "2 entries for microbatches of 3 and of 4 rows.*It does not"),
        ("evaluate", 4, 7, confusion, r"the shape \(2, 2\) for 7 rows, and \(4, 2\) joined from"),
        # No check compares outputs in training.
        ("backward", 2, 6, lambda *_: torch.zeros(7, 2), "7 entries for .* of 2 rows each"),
    ],
)
def test_output_with_fixed_length_warns_once(work, size, rows, make, named):
    run = getattr(returning(with_outputs(table=make), size), work)
    with pytest.warns(MetricWarning, match=f"'table' has {named}") as caught:
        _ = [run(pair(rows), return_outputs=True) for _ in range(2)]
    assert len([each for each in caught if each.category is MetricWarning]) == 1


def test_output_verified_by_check_gives_no_length_warning():
    # Three of every four rows, as a threshold could return by chance.
    forward = with_outputs(found=lambda batch, outputs: outputs[batch[0][:, 0] > 0])
    inputs, targets = pair(16)
    inputs[:, 0] = torch.tensor([1.0, 1.0, 1.0, -1.0]).repeat(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MetricWarning)
        outputs = returning(forward, 4).evaluate((inputs, targets), return_outputs=True).outputs
    assert len(outputs["found"]) == 12


def test_unknown_return_outputs_value_raises_value_error():
    with pytest.raises(ValueError, match=r"return_outputs='cpu' is invalid. .* 'host', 'device'"):
        returning(with_outputs()).backward(pair(), return_outputs="cpu")  # type: ignore[arg-type]


# Carry


class Recurrent(nn.Module):
    def __init__(self, kind="GRU"):
        super().__init__()
        torch.manual_seed(0)
        self.cell = getattr(nn, kind)(FEATURES, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, FEATURES)
        self.double()

    def forward(self, inputs, carry):
        outputs, carry = self.cell(inputs, carry)
        return self.head(outputs), carry


def step(model, batch, carry) -> dict[str, Any]:
    outputs, carry = model(batch["x"], carry)
    return {"loss": (outputs - batch["y"]).square().mean(), "outputs": outputs, "carry": carry}


def carrying(model, layout: Any = 1, **options: Any) -> Microbatcher:
    given = {"forward": step, "loss_average": "samples", "features": [Carry(layout)], **options}
    return Microbatcher(model, **given)


def windows() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    series = torch.randn(ROWS, 4 * STEPS + 1, FEATURES, generator=generator).double()
    cut = zip(series[:, :-1].split(STEPS, 1), series[:, 1:].split(STEPS, 1), strict=True)
    return [{"x": x, "y": y} for x, y in cut]


def detached(carry):
    return carry.detach() if isinstance(carry, torch.Tensor) else tuple(map(detached, carry))


@pytest.mark.parametrize(
    ("kind", "size"), [("LSTM", 6), ("LSTM", 4), ("LSTM", "auto"), ("GRU", 3), ("GRU", 1)]
)
def test_carry_passes_from_batch_to_batch(kind, size):
    plain, model = Recurrent(kind), Recurrent(kind)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    microbatcher = carrying(model, optimizer=optimizers[1], microbatch_size=size)
    tolerance = {"rtol": 0, "atol": 0} if size in (6, "auto") else {"rtol": 1e-12, "atol": 1e-12}
    carry = expected = None
    for batch in windows():
        wanted, result = step(plain, batch, expected), microbatcher.backward(batch, carry=carry)
        wanted["loss"].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        carry, expected = result.carry, detached(wanted["carry"])
        torch.testing.assert_close(result.loss, wanted["loss"].detach(), **tolerance)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), **tolerance)


def test_evaluation_and_prediction_pass_carry():
    model = Recurrent("LSTM")
    microbatcher = carrying(model, eval_microbatch_size=4)
    carry = expected = None
    for batch in windows():
        with torch.no_grad():
            outputs, wanted = model(batch["x"], expected)
        predicted = microbatcher.predict(batch, carry=carry)["outputs"]
        result = microbatcher.evaluate(batch, return_outputs=True, carry=carry)
        torch.testing.assert_close(result.outputs["outputs"], outputs)
        torch.testing.assert_close(predicted, outputs)
        torch.testing.assert_close(result.carry, wanted)
        carry, expected = result.carry, wanted


def test_user_callbacks_receive_batches_without_carry():
    seen: list[Any] = []

    class Rows:
        count = 0

        def update(self):
            """Do nothing: `update_metric` counts."""

    def count(batch):
        seen.append(batch)
        return int(batch["x"].numel())

    def observe(event, subject):
        seen.extend([subject.batch] if isinstance(subject, Microbatch) else [])

    def update(metric, outputs, batch):
        seen.append(batch)
        metric.count += len(batch["x"])

    features = [Carry(1), UpdateMetric(update), Observing(observe)]
    options: Any = {"loss_average": count, "features": features, "microbatch_size": 4}
    microbatcher, metric, carry = carrying(Recurrent(), **options), Rows(), None
    for batch in windows():
        carry = microbatcher.backward(batch, metric, carry=carry).carry
    assert metric.count == 4 * ROWS
    assert len(seen) > 20
    assert all(type(each) is dict for each in seen)


def test_carry_with_different_row_count_is_rejected():
    microbatcher, (first, second, *_) = carrying(Recurrent()), windows()
    carry = microbatcher.backward(first, carry=None).carry
    shorter = {name: each[:4] for name, each in second.items()}
    with pytest.raises(
        BatchError, match=r"carry and of the batch disagree: 6 and 4\. .*carry=None"
    ):
        microbatcher.backward(shorter, carry=carry)
    microbatcher.backward(second, carry=carry)


def test_carry_layout_may_name_entries_that_start_as_none():
    microbatcher, carry = carrying(Recurrent("LSTM"), {"0": 1, "1": 1}), None
    for batch in windows():
        carry = microbatcher.backward(batch, carry=carry).carry


def test_carry_with_wrong_layout_or_accumulation_is_rejected():
    model, batch = Recurrent(), windows()[0]
    for layout in (0, {"": 2}):
        with pytest.raises(
            LossError, match=r"a carry of \d rows for a microbatch of 6\. .*dimension"
        ):
            carrying(model, layout).backward(batch)
    with pytest.raises(ValueError, match="call backward for each of them"):
        carrying(model).accumulate(windows())


def test_carry_is_detached_between_batches():
    model, (first, second, *_) = Recurrent(), windows()
    twin, microbatcher = copy.deepcopy(model), carrying(model, microbatch_size=2)
    carry = microbatcher.backward(first).carry
    assert not carry.requires_grad
    microbatcher.backward(second, carry=carry)
    result = step(twin, first, None)
    result["loss"].backward()
    step(twin, second, result["carry"].detach())["loss"].backward()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
