"""An OOM inside a module with its own size ends the attempt and reduces that size."""

import copy
import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automicro import (
    Fixed,
    Halving,
    Microbatcher,
    NestedSplit,
    SampleTooLargeError,
    Trainer,
    is_extra_pass,
    split,
)
from automicro.errors import LossAverageError
from automicro.features import Nested, WhenTooLarge
from automicro.savers.levels import make_levels
from automicro.torch_private_execution import in_backward
from tests.nested.parts_in_slices import ROWS, copy_of, gradients, make_part, same
from tests.sweeps import mostly_in_sweeps
from tests.torture.engine.faults import Fault, FaultMode
from tests.torture.engine.subject import begin_at_level

CPU = torch.device("cpu")


def retry(nested: NestedSplit, attempt: Callable[[], Any]) -> Any:
    """Run an attempt again as long as the part reduces its size, and return its result."""
    while True:
        torch.manual_seed(7)
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            if not nested.took_shortage():
                raise
            told = "".join(getattr(error, "__notes__", ()))
        assert not told or f"memory ran out in {nested.name} (a part with its own size)" in told


@pytest.mark.parametrize(
    "name",
    mostly_in_sweeps(
        ["mlp", "mlp tail", "sum tail", "joint tail", "tied tail"], quick=["mlp tail"]
    ),
)
def test_oom_at_any_operation_of_part_leaves_no_trace(name: str) -> None:
    """The result equals, bit for bit, a run with the final sizes from the start."""
    part, given = make_part(name, p=0.3)
    averages = {"sum tail": "none", "joint tail": "samples"}
    options: Any = {"microbatch_size": "auto", "loss_average": averages.get(name, "tokens")}
    warm = copy_of(part)
    nested = split(warm, **options)
    for _ in range(2):  # the first calls compare rows
        warm(*given)

    def run(*numbers: int) -> tuple[Any, list[int], int]:
        nested.load_state_dict({})
        with FaultMode([Fault(each) for each in numbers]) as mode:
            found = retry(nested, lambda: gradients(warm, warm, given))
        return found, nested.sizes, mode.num_operations

    _, _, count = run()
    seen = set()
    step = max(1, count // 12)
    for number, gap in [(n, gap) for gap in (0, 12, 60) for n in range(0, count, step)]:
        try:
            found, sizes, _ = run(number, number + gap)
        except torch.OutOfMemoryError:
            continue  # OOM outside the part: the caller retries
        seen.add(tuple(sizes))
        forced = copy.deepcopy(warm)
        forced.forward.nested._policy = Fixed(max(sizes))
        torch.manual_seed(7)
        # An unsplit part computes its gradient in the backward and rounds differently.
        rounding = 1e-12 if max(sizes) == ROWS else 0.0
        same(gradients(forced, forced, given), found, rtol=rounding, atol=rounding)
    assert len(seen) > 1


def test_oom_in_backward_of_middle_part_reduces_its_size() -> None:
    class Narrow(Heavy):
        def forward(self, x: Tensor) -> Any:
            if in_backward() and len(x) > 3:
                raise torch.OutOfMemoryError("too many rows")
            return super().forward(x)

    part = Narrow(8).double()
    hidden = torch.randn(16, 16, dtype=torch.double, requires_grad=True)
    wanted = part(hidden).detach()
    nested = split(part, microbatch_size=Halving(initial=8))
    found = retry(nested, lambda: gradients(part, part, [hidden]))
    torch.testing.assert_close(found[0], wanted)
    assert (max(nested.sizes), nested.ooms) == (2, 2)
    nested.remove()
    same(found, gradients(lambda x: torch.cat([part(rows) for rows in x.split(2)]), part, [hidden]))
    split(part, microbatch_size=8)
    with pytest.raises(torch.OutOfMemoryError, match="too many rows"):
        part(hidden).sum().backward()


class Heavy(nn.Module):
    """Needs far more memory than all layers before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("limit", ["700KiB", "2MiB"])
def test_microbatch_shrinks_only_if_part_cannot(limit: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), Heavy(1024))
    batch = torch.randn(64, 16), torch.randn(64, 2)
    other = copy_of(model)
    plain = Microbatcher(other, loss_fn=nn.MSELoss(), memory_limit=limit)
    nested = Microbatcher(
        model, loss_fn=nn.MSELoss(), features=[Nested({"2": "auto"})], memory_limit=limit
    )
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


def test_part_with_single_row_too_large_raises_oom() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Heavy(100_000))
    microbatcher = Microbatcher(
        model, loss_fn=nn.MSELoss(), features=[Nested({"1": "auto"})], memory_limit="7.5MiB"
    )
    with pytest.raises(torch.OutOfMemoryError):
        microbatcher.backward((torch.randn(8, 16), torch.randn(8, 2)))
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.sweep
def test_oom_before_part_is_reached_ends_search() -> None:
    """The check reaches the unsplit part, but every attempt fails before it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=500, n_positions=256, n_embd=64, n_layer=4, n_head=4
    )
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(500, (4, 256))
    attempts = 0

    def count(*_: Any) -> None:
        nonlocal attempts
        attempts += 1
        assert attempts < 40, "it begins again without an end"

    model.register_forward_pre_hook(count)
    microbatcher = Microbatcher(model, features=[WhenTooLarge("nested")], memory_limit="8MiB")
    with pytest.raises(SampleTooLargeError):
        microbatcher.backward({"input_ids": ids, "labels": ids})


def test_oom_during_check_propagates_to_caller() -> None:
    def tail(hidden: Tensor, targets: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("always")

    with pytest.raises(torch.OutOfMemoryError, match="always"):
        NestedSplit(tail)(torch.randn(8, 4), torch.randint(4, (8,)))


def mean_by_mask(hidden: Tensor, mask: Tensor) -> Tensor:
    return (hidden.square().mean(1) * mask).sum() / mask.sum()


def test_oom_during_check_does_not_hide_loss_errors() -> None:
    given = torch.randn(6, 4, dtype=torch.double), torch.ones(6, dtype=torch.double)
    given[1][-1] = 0.5

    with FaultMode() as counting, pytest.raises(LossAverageError):
        split(mean_by_mask, microbatch_size=3)(*given)
    assert counting.num_operations > 100
    for number in range(0, counting.num_operations, counting.num_operations // 15):
        with FaultMode([Fault(number)]), pytest.raises((LossAverageError, torch.OutOfMemoryError)):
            split(mean_by_mask, microbatch_size=3)(*given)


def test_check_under_low_memory_detects_masked_rows() -> None:
    def tail(hidden: Tensor, mask: Tensor) -> Tensor:
        if len(hidden) > 2 and is_extra_pass():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return mean_by_mask(hidden, mask)

    given = torch.randn(6, 4, requires_grad=True), torch.tensor([1.0, 1, 1, 0, 1, 1])
    with pytest.raises(LossAverageError, match="does not end in"):
        split(tail, microbatch_size=2)(*given)


def test_calls_with_varying_row_counts_keep_size_limit() -> None:
    def tail(hidden: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(hidden) > 3:
            raise torch.OutOfMemoryError("too many rows")
        return F.cross_entropy(hidden, targets)

    def train(*given: Any) -> None:
        nested(*given).backward()

    nested = NestedSplit(tail)
    for num_rows in (16, 15, 16, 5, 1, 16):
        hidden = torch.randn(num_rows, 4, requires_grad=True)
        targets = torch.randint(4, (num_rows,))
        retry(nested, functools.partial(train, hidden, targets))
        assert sum(nested.sizes) == num_rows
        assert max(nested.sizes) <= 3


class ChangingSize(Fixed):
    """A policy that proposes another size in the backward than in the forward."""

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return 2 if in_backward() else super().propose(num_rows, cost)


class Drawing(nn.Module):
    """A block whose part draws random numbers."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__()
        # Two dropouts make slices draw alternately.
        self.part = nn.Sequential(
            nn.Linear(4, 8), nn.Dropout(0.5), Refusing(most), nn.Dropout(0.5), nn.Linear(8, 4)
        )

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(x + self.part(x))


class Refusing(nn.Module):
    """Runs out of memory for more than `most` rows with a graph."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Tensor) -> Any:
        if torch.is_grad_enabled() and len(x) > self.most:
            raise torch.OutOfMemoryError("too many rows")
        return x


@pytest.mark.parametrize("around", ["recompute", "part", "recompute, part"])
def test_recomputed_part_repeats_its_slices(around: str) -> None:
    """Other slices would draw other random numbers, and give the gradient of another loss."""
    torch.manual_seed(0)
    model = nn.Sequential(Drawing(), Drawing()).double()
    first, second = (cast(Drawing, each) for each in model)
    hidden = torch.randn(12, 4, dtype=torch.double, requires_grad=True)

    def by_hand(x: Tensor) -> Any:
        rows = 6 if "part" in around else 12
        return second(torch.cat([first(each) for each in x.split(rows)]))

    def run(forward: Any, policy: Fixed) -> Any:
        blocks: list[Any] = [first, second]
        parts = [split(each.part, microbatch_size=policy) for each in blocks]
        torch.manual_seed(7)
        found = gradients(forward, model, [hidden])
        for part in parts:
            part.remove()
        return found

    wanted = run(by_hand, Fixed(3))
    if "part" in around:
        split(first, microbatch_size=6)
    level = make_levels("recompute" if "recompute" in around else "error", [model], CPU)[-1]
    with level.applied():
        same(run(model, ChangingSize(3)), wanted)


def test_oversized_part_in_recomputed_block_is_split() -> None:
    """Tensors saved before the failure would be missing when the block runs again."""
    torch.manual_seed(0)
    blocks = nn.Sequential(Drawing(most=3), Drawing(most=3)).double()
    model = nn.Sequential(blocks, nn.Linear(4, 2).double())
    batch = torch.randn(12, 4, dtype=torch.double), torch.randn(12, 2, dtype=torch.double)
    microbatcher = Microbatcher(
        model,
        loss_fn=nn.MSELoss(),
        features=[Nested({"0.0.part": "auto", "0.1.part": "auto"}), WhenTooLarge("recompute")],
        probe=False,
    )
    begin_at_level(microbatcher, 1)
    result = microbatcher.backward(batch)
    assert (result.level, result.microbatch_size) == ("recompute", 12)
    assert max(result.nested_sizes.values()) <= 3
    # Each part loses an attempt with all 12 rows and one with slices of 6.
    assert (result.ooms, result.nested_ooms, result.attempts) == (0, 4, 5)


def test_nested_ooms_are_counted_in_summary() -> None:
    def trained(most: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Drawing(most), nn.Linear(4, 2))
        data = [(torch.randn(12, 4), torch.randn(12, 2)) for _ in range(3)]
        return Trainer(
            model,
            data,
            loss_fn=nn.MSELoss(),
            optimizer=torch.optim.SGD,
            features=[Nested({"0.part": "auto"})],
            probe=False,
            max_duration="1ep",
            microbatch_size=None,
            progress=False,
        ).fit()

    assert trained(1000).nested_ooms == 0
    summary = trained(3)
    assert (summary.ooms, summary.nested_ooms) == (0, 2)
    assert "0 (0 in train, 0 in eval), and 2 in nested modules" in str(summary)


class LowBackwardMemory(nn.Module):
    """Dropout between two layers, with less memory in a surrounding backward than in a forward."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16).double(), nn.Linear(16, 6).double()
        self.most = most
        self.masks: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        if in_backward() and len(hidden) > self.most:
            raise torch.OutOfMemoryError
        mask = torch.rand(len(hidden), 16) > (0.4 if self.training else -1.0)
        self.masks.append(mask)
        output: Tensor = self.second(torch.tanh(self.first(hidden)) * mask)
        return output


class BlockWithPart(nn.Module):
    """A block that contains a part."""

    def __init__(self, most: int = 99) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(6).double(), LowBackwardMemory(most)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = hidden + self.part(self.norm(hidden))
        return output


@pytest.mark.filterwarnings("ignore:.* changes masks once per slice")
def test_part_inside_checkpointed_block_repeats_its_slices() -> None:
    block = BlockWithPart(most=4)
    nested = split(block.part, microbatch_size="auto")
    hidden = torch.randn(8, 6, dtype=torch.double, requires_grad=True)
    block(hidden)  # checks a few rows

    def step() -> Any:
        torch.manual_seed(0)
        block.part.masks.clear()
        return checkpoint(block, hidden, use_reentrant=True)

    output = step()
    with pytest.raises(torch.OutOfMemoryError):  # other slices would draw other random numbers
        output.sum().backward()
    block.zero_grad()
    step().sum().backward()
    assert nested.sizes == [4, 4]
    drawn = block.part.masks
    assert len(drawn) > 2
    for index, mask in enumerate(drawn):
        assert torch.equal(mask, drawn[index % 2])


@pytest.mark.filterwarnings("ignore:.* changes masks once per slice")
def test_oom_in_checkpointed_forward_is_raised_and_next_call_fits() -> None:
    block = BlockWithPart()
    nested = split(block.part, microbatch_size="auto")
    hidden = torch.randn(8, 6, dtype=torch.double, requires_grad=True)
    block(hidden)
    forward, failures = block.part.first.forward, [1]

    def fails_once(rows: Tensor) -> Tensor:
        if len(rows) == 8 and failures:
            failures.pop()
            raise torch.OutOfMemoryError
        return forward(rows)

    block.part.first.forward = fails_once  # type: ignore[method-assign, assignment]
    with pytest.raises(torch.OutOfMemoryError):
        checkpoint(block, hidden, use_reentrant=False)
    checkpoint(block, hidden, use_reentrant=False).sum().backward()
    assert nested.sizes == [4, 4]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_tail_inside_checkpoint_matches_gradients(use_reentrant: bool) -> None:
    head = nn.Linear(6, 3).double()
    encoder = nn.Linear(6, 6).double()
    tail = split(lambda x, targets: F.cross_entropy(head(x), targets), microbatch_size=3)

    def loss(tail: Any, hidden: Tensor) -> Tensor:
        found: Tensor = tail(torch.tanh(encoder(hidden)), targets)
        return found

    targets = torch.randint(3, (8,))
    hidden = torch.randn(8, 6, dtype=torch.double, requires_grad=True)
    for _ in range(2):
        found = torch.autograd.grad(loss(tail, hidden), [encoder.weight, head.weight])
        checkpointed = checkpoint(loss, tail, hidden, use_reentrant=use_reentrant)
        encoder.zero_grad()
        head.zero_grad()
        checkpointed.backward()
        torch.testing.assert_close(encoder.weight.grad, found[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(head.weight.grad, found[1], rtol=1e-12, atol=0)
