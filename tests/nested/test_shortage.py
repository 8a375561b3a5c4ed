"""An OOM inside a module with its own size ends the attempt and reduces that size."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
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
from tests.nested.parts_in_slices import copy_of, floats, gradients, same
from tests.torture.engine.faults import Fault, FaultMode
from tests.torture.engine.subject import begin_at_level


def too_many_rows():
    raise torch.OutOfMemoryError("too many rows")


def retry(nested, attempt):
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


class Heavy(nn.Module):
    """Needs far more memory than all layers before it, or fails in the backward."""

    def __init__(self, width, most=99):
        super().__init__()
        self.up, self.down, self.most = nn.Linear(16, width), nn.Linear(width, 2), most

    def forward(self, x):
        if in_backward() and len(x) > self.most:
            too_many_rows()
        return self.down(torch.tanh(self.up(x)))


def test_oom_in_backward_of_middle_part_reduces_its_size():
    part, hidden = Heavy(8, most=3).double(), floats(16, 16)
    nested = split(part, microbatch_size=Halving(initial=8))
    found = retry(nested, lambda: gradients(part, part, [hidden]))
    assert (max(nested.sizes), nested.ooms) == (2, 2)
    nested.remove()
    same(found, gradients(lambda x: torch.cat([part(rows) for rows in x.split(2)]), part, [hidden]))
    split(part, microbatch_size=8)
    with pytest.raises(torch.OutOfMemoryError, match="too many rows"):
        part(hidden).sum().backward()


@pytest.mark.parametrize(("limit", "expected"), [("700KiB", [32, 64]), ("2MiB", None)])
def test_microbatch_shrinks_only_if_part_cannot(limit, expected):
    batch, sizes = (torch.randn(64, 16), torch.randn(64, 2)), []
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), Heavy(1024))
    for features in ((), [Nested({"2": "auto"})]):
        trained = copy_of(model)
        microbatcher = Microbatcher(
            trained, loss_fn=nn.MSELoss(), features=features, memory_limit=limit
        )
        for _ in range(3):
            trained.zero_grad()
            result = microbatcher.backward(batch)
        sizes.append(result.microbatch_size)
    assert sizes[1] >= sizes[0]
    assert sizes == (expected or sizes)


def test_part_with_single_row_too_large_raises_oom():
    model = nn.Sequential(nn.Linear(16, 16), Heavy(100_000))
    microbatcher = Microbatcher(
        model, loss_fn=nn.MSELoss(), features=[Nested({"1": "auto"})], memory_limit="7.5MiB"
    )
    with pytest.raises(torch.OutOfMemoryError):
        microbatcher.backward((torch.randn(8, 16), torch.randn(8, 2)))
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.sweep
def test_oom_before_part_is_reached_ends_search():
    """The check reaches the unsplit part, but every attempt fails before it."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 500, "n_positions": 256, "n_embd": 64, "n_layer": 4, "n_head": 4}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small))
    ids, attempts = torch.randint(500, (4, 256)), list[Any]()

    def count(*given):
        attempts.append(given)
        assert len(attempts) < 40, "it begins again without an end"

    model.register_forward_pre_hook(count)
    microbatcher = Microbatcher(model, features=[WhenTooLarge("nested")], memory_limit="8MiB")
    with pytest.raises(SampleTooLargeError):
        microbatcher.backward({"input_ids": ids, "labels": ids})


def test_oom_during_check_propagates_to_caller():
    with pytest.raises(torch.OutOfMemoryError, match="too many rows"):
        NestedSplit(lambda hidden, targets: too_many_rows())(torch.randn(8, 4), torch.ones(8))


def mean_by_mask(hidden, mask):
    return (hidden.square().mean(1) * mask).sum() / mask.sum()


def test_oom_during_check_does_not_hide_loss_errors():
    given = torch.randn(6, 4).double(), torch.tensor([1.0, 1, 1, 1, 1, 0.5]).double()
    with FaultMode() as counting, pytest.raises(LossAverageError):
        split(mean_by_mask, microbatch_size=3)(*given)
    assert counting.num_operations > 100
    for number in range(0, counting.num_operations, counting.num_operations // 15):
        with FaultMode([Fault(number)]), pytest.raises((LossAverageError, torch.OutOfMemoryError)):
            split(mean_by_mask, microbatch_size=3)(*given)


def test_check_under_low_memory_detects_masked_rows():
    def tail(hidden, mask):
        if len(hidden) > 2 and is_extra_pass():
            too_many_rows()
        return mean_by_mask(hidden, mask)

    given = torch.randn(6, 4, requires_grad=True), torch.tensor([1.0, 1, 1, 0, 1, 1])
    with pytest.raises(LossAverageError, match="does not end in"):
        split(tail, microbatch_size=2)(*given)


def test_calls_with_varying_row_counts_keep_size_limit():
    def tail(hidden, targets):
        if torch.is_grad_enabled() and len(hidden) > 3:
            too_many_rows()
        return F.cross_entropy(hidden, targets)

    nested = NestedSplit(tail)
    for num_rows in (16, 15, 16, 5, 1, 16):
        given = torch.randn(num_rows, 4, requires_grad=True), torch.randint(4, (num_rows,))
        retry(nested, functools.partial(lambda given: nested(*given).backward(), given))
        assert sum(nested.sizes) == num_rows
        assert max(nested.sizes) <= 3


class ChangingSize(Fixed):
    """A policy that proposes another size in the backward than in the forward."""

    def propose(self, num_rows, cost=None):
        return 2 if in_backward() else super().propose(num_rows, cost)


class Refusing(nn.Module):
    def __init__(self, most):
        super().__init__()
        self.most = most

    def forward(self, x):
        if torch.is_grad_enabled() and len(x) > self.most:
            too_many_rows()
        return x


class Drawing(nn.Module):
    """A block whose part draws random numbers; two dropouts make slices draw alternately."""

    def __init__(self, most=1000):
        super().__init__()
        layers = nn.Linear(4, 8), nn.Dropout(0.5), Refusing(most), nn.Dropout(0.5), nn.Linear(8, 4)
        self.part = nn.Sequential(*layers)

    def forward(self, x):
        return torch.tanh(x + self.part(x))


@pytest.mark.parametrize("around", ["recompute", "part", "recompute, part"])
def test_recomputed_part_repeats_its_slices(around):
    """Other slices would draw other random numbers, and give the gradient of another loss."""
    model, hidden = nn.Sequential(Drawing(), Drawing()).double(), floats(12, 4)
    first, second = blocks = [each for each in model if isinstance(each, Drawing)]

    def by_hand(x):
        rows = 6 if "part" in around else 12
        return second(torch.cat([first(each) for each in x.split(rows)]))

    def run(forward, policy):
        parts = [split(each.part, microbatch_size=policy) for each in blocks]
        torch.manual_seed(7)
        found = gradients(forward, model, [hidden])
        for part in parts:
            part.remove()
        return found

    wanted = run(by_hand, Fixed(3))
    if "part" in around:
        split(first, microbatch_size=6)
    when = "recompute" if "recompute" in around else "error"
    with make_levels(when, [model], torch.device("cpu"))[-1].applied():
        same(run(model, ChangingSize(3)), wanted)


def test_oversized_part_in_recomputed_block_is_split():
    """Tensors saved before the failure would be missing when the block runs again."""
    blocks = nn.Sequential(Drawing(most=3), Drawing(most=3))
    microbatcher = Microbatcher(
        nn.Sequential(blocks, nn.Linear(4, 2)).double(),
        loss_fn=nn.MSELoss(),
        features=[Nested({"0.0.part": "auto", "0.1.part": "auto"}), WhenTooLarge("recompute")],
        probe=False,
    )
    begin_at_level(microbatcher, 1)
    result = microbatcher.backward((torch.randn(12, 4).double(), torch.randn(12, 2).double()))
    assert (result.level, result.microbatch_size) == ("recompute", 12)
    assert max(result.nested_sizes.values()) <= 3
    # Each part loses an attempt with all 12 rows and one with slices of 6.
    assert (result.ooms, result.nested_ooms, result.attempts) == (0, 4, 5)


@pytest.mark.parametrize(("most", "ooms"), [(1000, 0), (3, 2)])
def test_nested_ooms_are_counted_in_summary(most, ooms):
    summary = Trainer(
        nn.Sequential(Drawing(most), nn.Linear(4, 2)),
        [(torch.randn(12, 4), torch.randn(12, 2)) for _ in range(3)],
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        features=[Nested({"0.part": "auto"})],
        probe=False,
        max_duration="1ep",
        microbatch_size=None,
        progress=False,
    ).fit()
    assert (summary.ooms, summary.nested_ooms) == (0, ooms)
    assert ("0 (0 in train, 0 in eval), and 2 in nested modules" in str(summary)) is bool(ooms)


class LowBackwardMemory(nn.Module):
    """Dropout between two layers, with less memory in a surrounding backward than in a forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16).double(), nn.Linear(16, 6).double()
        self.most, self.fails, self.masks = 4, False, list[Any]()

    def forward(self, hidden):
        if in_backward() and len(hidden) > self.most:
            too_many_rows()
        self.masks.append(torch.rand(len(hidden), 16) > 0.4)
        return self.second(torch.tanh(self.first(hidden)) * self.masks[-1])


@pytest.mark.filterwarnings("ignore:.* changes masks once per slice")
def test_part_inside_checkpointed_block_repeats_its_slices():
    part: Any = LowBackwardMemory()
    nested, hidden = split(part, microbatch_size="auto"), floats(8, 6)
    part(hidden)  # checks a few rows

    def step():
        torch.manual_seed(0)
        part.masks.clear()
        return checkpoint(lambda x: x + part(2 * x), hidden, use_reentrant=True)

    output = step()
    with pytest.raises(torch.OutOfMemoryError):  # other slices would draw other random numbers
        output.sum().backward()
    part.zero_grad()
    step().sum().backward()
    assert nested.sizes == [4, 4]
    assert len(part.masks) > 2
    for index, mask in enumerate(part.masks):
        assert torch.equal(mask, part.masks[index % 2])


def test_oom_in_checkpointed_forward_is_raised_and_next_call_fits():
    layer, failures = nn.Linear(6, 6).double(), list[int]()

    def fails_once(rows):
        if len(rows) == 8 and failures:
            failures.pop()
            too_many_rows()
        return layer(rows)

    part = split(fails_once, microbatch_size="auto", modules=[layer])
    hidden = floats(8, 6)
    part(hidden)
    failures.append(1)
    with pytest.raises(torch.OutOfMemoryError):
        checkpoint(part, hidden, use_reentrant=False)
    checkpoint(part, hidden, use_reentrant=False).sum().backward()
    assert part.sizes == [4, 4]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_tail_inside_checkpoint_matches_gradients(use_reentrant):
    encoder, head = nn.Linear(6, 6).double(), nn.Linear(6, 3).double()
    tail = split(lambda x, targets: F.cross_entropy(head(x), targets), microbatch_size=3)
    hidden, targets = floats(8, 6), torch.randint(3, (8,))

    def loss(hidden):
        return tail(torch.tanh(encoder(hidden)), targets)

    for _ in range(2):
        wanted = torch.autograd.grad(loss(hidden), [encoder.weight, head.weight])
        encoder.zero_grad()
        head.zero_grad()
        checkpoint(loss, hidden, use_reentrant=use_reentrant).backward()
        found = encoder.weight.grad, head.weight.grad
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
