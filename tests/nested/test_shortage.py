"""Memory that runs out inside of a part: one slice is undone, and one part has a smaller size."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from automicro import Fixed, Microbatcher, NestedSplit, SampleTooLargeError, split
from automicro.nested import slices
from tests.nested.parts_in_slices import CASES, gradients, made, same, twin


class FailingAt(TorchDispatchMode):
    """Runs out of memory at operations of given numbers."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self._numbers = numbers
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        if self.count in self._numbers:
            raise torch.OutOfMemoryError("injected")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
def test_a_shortage_at_any_operation_of_a_part_leaves_no_trace(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes of it is bit for bit what the sizes give that it ended with."""
    part, given = made(name, p=0.3)
    average: Any = "samples" if "joint" in name else "tokens"
    options = {"microbatch_size": "auto", "loss_average": average}
    warm = twin(part)
    nested = split(warm, **options)
    warm(*given)

    def run(*numbers: int) -> tuple[Any, list[int], int]:
        nested.load_state_dict({})
        torch.manual_seed(7)
        counting = FailingAt(*numbers)
        with counting:
            found = gradients(warm, warm, given)
        return found, nested.sizes, counting.count

    _, _, count = run()
    seen = set()
    step = max(1, count // 12)
    for number, gap in [(n, gap) for gap in (0, 12, 60) for n in range(1, count + 1, step)]:
        try:
            found, sizes, _ = run(number, number + gap)
        except torch.OutOfMemoryError:
            continue  # outside of the part, or where it cannot be cut: the caller's to repeat
        seen.add(tuple(sizes))
        forced = copy.deepcopy(warm)
        monkeypatch.setattr(slices, "balanced_sizes", lambda *_, sizes=sizes, **__: list(sizes))
        forced.forward.nested._policy = Fixed(max(sizes))
        torch.manual_seed(7)
        same(gradients(forced, forced, given), found, rtol=0, atol=0)
        monkeypatch.undo()
    assert len(seen) > 1


def test_a_shortage_in_the_backward_of_a_middle_part_cuts_that_slice_smaller() -> None:
    class Narrow(Heavy):
        def forward(self, x: Tensor) -> Any:
            if torch.is_grad_enabled() and len(x) > 3:
                raise torch.OutOfMemoryError("too many rows for a graph")
            return super().forward(x)

    part = Narrow(8).double()
    hidden = torch.randn(16, 16, dtype=torch.double, requires_grad=True)
    with torch.no_grad():
        wanted = part(hidden)
    nested = split(part)
    found = gradients(part, part, [hidden])
    torch.testing.assert_close(found[0], wanted)
    assert max(nested.sizes) <= 3
    nested.remove()
    same(found, gradients(lambda x: torch.cat([part(rows) for rows in x.split(2)]), part, [hidden]))
    split(part, microbatch_size=8)
    with pytest.raises(torch.OutOfMemoryError, match="too many rows"):
        part(hidden).sum().backward()


class Heavy(nn.Module):
    """Needs many times the memory of all before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("limit", ["700KiB", "1MiB", "2MiB", "4MiB"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_only_where_the_part_cannot_shrink_does_the_microbatch(limit: str, dropout: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(dropout), Heavy(1024))
    batch = torch.randn(64, 16), torch.randn(64, 2)
    other = twin(model)
    plain = Microbatcher(other, loss_fn=nn.MSELoss(), memory_limit=limit)
    nested = Microbatcher(model, loss_fn=nn.MSELoss(), nested={"2": "auto"}, memory_limit=limit)
    sizes = []
    for each, trained in ((plain, other), (nested, model)):
        try:
            for _ in range(3):
                trained.zero_grad()
                result = each.backward(batch)
            sizes.append(result.microbatch_size)
        except SampleTooLargeError:
            sizes.append(0)
    assert sizes[1] >= sizes[0]
    assert limit != "700KiB" or sizes == [32, 64]


def test_a_part_whose_single_row_does_not_fit_ends_with_an_error_that_says_so() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Heavy(100_000))
    microbatcher = Microbatcher(
        model, loss_fn=nn.MSELoss(), nested={"1": "auto"}, memory_limit="7.5MiB"
    )
    with pytest.raises(torch.OutOfMemoryError):
        microbatcher.backward((torch.randn(8, 16), torch.randn(8, 2)))
    assert all(each.grad is None for each in model.parameters())


def test_a_shortage_in_the_look_is_the_outer_loops() -> None:
    def tail(hidden: Tensor, targets: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("always")

    with pytest.raises(torch.OutOfMemoryError, match="always"):
        NestedSplit(tail)(torch.randn(8, 4), torch.randint(4, (8,)))


def test_calls_of_other_numbers_of_rows_keep_their_sizes() -> None:
    def tail(hidden: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(hidden) > 3:
            raise torch.OutOfMemoryError("too many rows")
        return F.cross_entropy(hidden, targets)

    nested = NestedSplit(tail)
    for num_rows in (16, 15, 16, 5, 1, 16):
        hidden = torch.randn(num_rows, 4, requires_grad=True)
        nested(hidden, torch.randint(4, (num_rows,))).backward()
        assert sum(nested.sizes) == num_rows
        assert max(nested.sizes) <= 3


def test_a_policy_that_is_fixed_lets_the_shortage_out() -> None:
    def tail(hidden: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(hidden) > 3:
            raise torch.OutOfMemoryError("too many rows")
        return F.cross_entropy(hidden, targets)

    hidden = torch.randn(16, 4, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError, match="too many rows"):
        NestedSplit(tail, microbatch_size=4)(hidden, torch.randint(4, (16,)))
    NestedSplit(tail, microbatch_size=3)(hidden, torch.randint(4, (16,))).backward()
    assert hidden.grad is not None
