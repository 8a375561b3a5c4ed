"""Outputs of training steps, and recurrent state carried from batch to batch."""

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
from automicro.step.events import Microbatch, Subject

ROWS, STEPS, FEATURES = 6, 5, 3
SIZES = [6, 4, 3, 1]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()


def pair(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, FEATURES).double(), torch.arange(rows) % 2


def with_outputs(model: nn.Module, batch: Any) -> dict[str, Any]:
    outputs = model(batch[0])
    names = [f"row {int(10 * value)}" for value in batch[0][:, 0]]
    return {"loss": nn.functional.cross_entropy(outputs, batch[1]), "a": outputs, "names": names}


@pytest.mark.parametrize("where", [True, "host", "device"])
@pytest.mark.parametrize("size", SIZES)
def test_outputs_of_all_rows_are_returned_in_order(size: int, where: Any) -> None:
    model = classifier().eval()
    batch = pair()
    microbatcher = Microbatcher(
        model, forward=with_outputs, loss_average="samples", microbatch_size=size
    )
    outputs = microbatcher.backward(batch, return_outputs=where).outputs
    assert list(outputs) == ["a", "names"]
    assert not outputs["a"].requires_grad
    torch.testing.assert_close(outputs["a"], model(batch[0]))
    assert outputs["names"] == with_outputs(model, batch)["names"]


def test_outputs_of_failed_attempt_are_discarded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    batch = torch.randn(256, 64), torch.randint(10, (256,))
    microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss())
    with MemoryBudget("1MiB"):
        result = microbatcher.backward(batch, return_outputs="host")
    assert result.ooms > 0
    torch.testing.assert_close(result.outputs, model(batch[0]).detach())


def test_outputs_kept_on_device_use_device_memory() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1024)
    batch = torch.randn(256, 4), torch.zeros(256, 1024)
    loss_fn = nn.MSELoss()

    def fewest(where: Any) -> int:
        microbatcher = Microbatcher(model, loss_fn=loss_fn, probe=False)
        with MemoryBudget("2400KiB"):
            return microbatcher.backward(batch, return_outputs=where).num_microbatches

    assert fewest("device") > fewest("host") >= fewest(False)


def test_error_reports_outputs_too_large_at_any_size() -> None:
    batch = torch.randn(256, 4), torch.zeros(256, 1024)
    microbatcher = Microbatcher(nn.Linear(4, 1024), loss_fn=nn.MSELoss(), probe=False)
    named = r"the joining of outputs of all rows \(return_outputs='host'\) at every size"
    with MemoryBudget("1700KiB"), pytest.raises(SampleTooLargeError, match=named):
        microbatcher.backward(batch, return_outputs="device")


def test_outputs_of_accumulated_batches_are_concatenated() -> None:
    model = classifier().eval()
    batches = [pair(4), pair(2), pair(5)]
    microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), microbatch_size=2)
    outputs = microbatcher.accumulate(batches, return_outputs=True).outputs
    torch.testing.assert_close(outputs, model(torch.cat([inputs for inputs, _ in batches])))


@pytest.mark.parametrize("size", [6, 2])
def test_outputs_that_cannot_be_joined_raise_at_any_size(size: int) -> None:
    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        return nn.functional.cross_entropy(outputs, batch[1]), (outputs, outputs.detach().mean())

    microbatcher = Microbatcher(
        classifier(), forward=forward, loss_average="samples", microbatch_size=size
    )
    with pytest.raises(BatchError, match=r"'1' is a 0-d Tensor .* Return one value per row"):
        microbatcher.backward(pair(), return_outputs=True)
    microbatcher.backward(pair())


def with_number(model: nn.Module, batch: Any) -> dict[str, Any]:
    return with_outputs(model, batch) | {"count": len(batch[0]), "share": 0.5}


def test_numeric_outputs_of_evaluation_require_whole_batch() -> None:
    def evaluated(size: int | None) -> Any:
        microbatcher = Microbatcher(classifier(), forward=with_number, eval_microbatch_size=size)
        return microbatcher.evaluate(pair(), return_outputs=True).outputs

    outputs = evaluated(None)
    assert (outputs["count"], outputs["share"], len(outputs["a"])) == (ROWS, 0.5, ROWS)
    with pytest.raises(BatchError, match="'count' is of type int"):
        evaluated(4)


def with_matrix(model: nn.Module, batch: Any) -> dict[str, Any]:
    given = with_outputs(model, batch)
    confusion = torch.zeros(2, 2).index_put_(
        (batch[1], given["a"].argmax(1)), torch.ones(len(batch[1])), accumulate=True
    )
    return given | {"confusion": confusion}


@pytest.mark.parametrize("is_training", [True, False])
def test_output_with_fixed_length_warns_once(is_training: bool) -> None:
    microbatcher = Microbatcher(
        classifier(), forward=with_matrix, microbatch_size=4, eval_microbatch_size=4
    )
    named = "'confusion' has 2 entries for microbatches of 3 and of 4 rows.*It does not"
    if not is_training:
        named = r"'confusion' has the shape \(2, 2\) for 7 rows, and \(4, 2\) joined from two parts"
    run = microbatcher.backward if is_training else microbatcher.evaluate
    with pytest.warns(MetricWarning, match=named) as caught:
        run(pair(7), return_outputs=True)
    assert len([each for each in caught if each.category is MetricWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", MetricWarning)
        run(pair(7), return_outputs=True)  # warns only once


def test_output_with_fixed_length_warns_for_equal_slices() -> None:
    """No check compares outputs in training."""

    def with_table(model: nn.Module, batch: Any) -> dict[str, Any]:
        return with_outputs(model, batch) | {"table": torch.zeros(7, 2)}

    microbatcher = Microbatcher(classifier(), forward=with_table, microbatch_size=2)
    with pytest.warns(MetricWarning, match="'table' has 7 entries for .* of 2 rows each"):
        microbatcher.backward(pair(6), return_outputs=True)


def test_output_verified_by_check_gives_no_length_warning() -> None:
    def with_found(model: nn.Module, batch: Any) -> dict[str, Any]:
        """Return three of every four rows, as a threshold could by chance."""
        given = with_outputs(model, batch)
        return given | {"found": given["a"][batch[0][:, 0] > 0]}

    inputs, targets = pair(16)
    inputs[:, 0] = torch.tensor([1.0, 1.0, 1.0, -1.0]).repeat(4)
    microbatcher = Microbatcher(classifier(), forward=with_found, eval_microbatch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MetricWarning)
        outputs = microbatcher.evaluate((inputs, targets), return_outputs=True).outputs
    assert len(outputs["found"]) == 12


def test_unknown_return_outputs_value_raises_value_error() -> None:
    microbatcher = Microbatcher(classifier(), loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match=r"return_outputs='cpu' is invalid. .* 'host', 'device'"):
        microbatcher.backward(pair(), return_outputs="cpu")  # type: ignore[arg-type]


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = getattr(nn, kind)(FEATURES, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, FEATURES)

    def forward(self, inputs: Tensor, carry: Any) -> tuple[Tensor, Any]:
        outputs, carry = self.cell(inputs, carry)
        return self.head(outputs), carry


def carrying(model: nn.Module, layout: Any = 1, **options: Any) -> Microbatcher:
    given: dict[str, Any] = {
        "forward": step,
        "loss_average": "samples",
        "features": [Carry(layout)],
        **options,
    }
    return Microbatcher(model, **given)


def step(model: nn.Module, batch: Mapping[str, Tensor], carry: Any) -> dict[str, Any]:
    outputs, carry = model(batch["x"], carry)
    return {"loss": (outputs - batch["y"]).square().mean(), "outputs": outputs, "carry": carry}


def windows(count: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    series = torch.randn(ROWS, count * STEPS + 1, FEATURES, generator=generator).double()
    cut = [slice(index * STEPS, (index + 1) * STEPS) for index in range(count)]
    return [{"x": series[:, :-1][:, each], "y": series[:, 1:][:, each]} for each in cut]


def detached(carry: Any) -> Any:
    return carry.detach() if isinstance(carry, Tensor) else tuple(map(detached, carry))


def manual(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    losses, carry = [], None
    for batch in windows():
        result = step(model, batch, carry)
        result["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        carry = detached(result["carry"])
        losses.append(result["loss"].detach())
    return losses


def with_carry(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> list[Tensor]:
    microbatcher = carrying(model, optimizer=optimizer, **options)
    losses, carry = [], None
    for batch in windows():
        result = microbatcher.backward(batch, carry=carry)
        optimizer.step()
        optimizer.zero_grad()
        carry = result.carry
        losses.append(result.loss)
    return losses


def trained(
    kind: str, run: Callable[[nn.Module, torch.optim.Optimizer], list[Tensor]]
) -> tuple[nn.Module, list[Tensor]]:
    model = Recurrent(kind).double()
    return model, run(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("size", [*SIZES, "auto"])
def test_carry_passes_from_batch_to_batch(kind: str, size: Any) -> None:
    plain, expected = trained(kind, manual)
    model, losses = trained(kind, lambda *given: with_carry(*given, microbatch_size=size))
    is_whole = size in (ROWS, "auto")
    tolerance = {"rtol": 0, "atol": 0} if is_whole else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(losses, expected, **tolerance)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, **tolerance)


def test_evaluation_and_prediction_pass_carry() -> None:
    model = Recurrent("LSTM").double()
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


def test_user_callbacks_receive_batches_without_carry() -> None:
    seen: list[Any] = []

    def count(batch: Any) -> int:
        seen.append(batch)
        return int(batch["x"].numel())

    def observe(event: str, subject: Subject) -> None:
        if isinstance(subject, Microbatch):
            seen.append(subject.batch)

    class Rows:
        count = 0

        def update(self) -> None:
            """Do nothing: `update_metric` counts."""

    def update(metric: Any, outputs: Any, batch: Any) -> None:
        seen.append(batch)
        metric.count += len(batch["x"])

    model = Recurrent("GRU").double()
    features = [Carry(1), UpdateMetric(update), Observing(observe)]
    microbatcher = carrying(model, loss_average=count, features=features, microbatch_size=4)
    metric, carry = Rows(), None
    for batch in windows():
        carry = microbatcher.backward(batch, metric, carry=carry).carry
    assert metric.count == 4 * ROWS
    assert len(seen) > 20
    assert all(type(each) is dict for each in seen)


def test_carry_with_different_row_count_is_rejected() -> None:
    model = Recurrent("GRU").double()
    microbatcher = carrying(model)
    first, second, *_ = windows()
    carry = microbatcher.backward(first, carry=None).carry
    shorter = {name: each[:4] for name, each in second.items()}
    with pytest.raises(
        BatchError, match=r"carry and of the batch disagree: 6 and 4\. .*carry=None"
    ):
        microbatcher.backward(shorter, carry=carry)
    microbatcher.backward(second, carry=carry)


def test_carry_layout_may_name_entries_that_start_as_none() -> None:
    microbatcher, carry = carrying(Recurrent("LSTM").double(), {"0": 1, "1": 1}), None
    for batch in windows():
        carry = microbatcher.backward(batch, carry=carry).carry


def test_carry_with_wrong_layout_forward_or_accumulation_is_rejected() -> None:
    model = Recurrent("GRU").double()
    for layout in (0, {"": 2}):
        with pytest.raises(
            LossError, match=r"a carry of \d rows for a microbatch of 6\. .*dimension"
        ):
            carrying(model, layout).backward(windows()[0])
    with pytest.raises(LossError, match="a mapping with 'loss' and 'carry'"):
        carrying(model, forward=lambda *given: step(*given)["loss"]).backward(windows()[0])
    with pytest.raises(ValueError, match=r"features=\[Carry\(1\)\] for nn.LSTM"):
        Microbatcher(model, forward=step).backward(windows()[0], carry=torch.zeros(2, 6, 4))
    with pytest.raises(ValueError, match=r"Carry[(]…[)] was given without forward=…"):
        Microbatcher(model, loss_fn=nn.MSELoss(), features=[Carry(1)])
    with pytest.raises(ValueError, match="call backward for each of them"):
        carrying(model).accumulate(windows())


def test_carry_is_detached_between_batches() -> None:
    model = Recurrent("GRU").double()
    twin = copy.deepcopy(model)
    microbatcher = carrying(model, microbatch_size=2)
    first, second, *_ = windows()
    carry = microbatcher.backward(first).carry
    assert not carry.requires_grad
    microbatcher.backward(second, carry=carry)
    result = step(twin, first, None)
    result["loss"].backward()
    step(twin, second, result["carry"].detach())["loss"].backward()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
