"""Blocks that are recomputed in the backward give bit-identical results."""

import copy
import inspect
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automicro.memory.budget import MemoryBudget
from automicro.ranks.interface import StrayedError
from automicro.reach import Reach
from automicro.savers.levels import Level
from automicro.savers.recompute import LeftOutError, _Saved
from tests.outside import Outside
from tests.savers.steps import (
    LEVELS,
    MODELS,
    ROWS,
    WIDTH,
    Block,
    batch,
    level_of,
    mean_square,
    stack,
    steps_at,
    take_step,
)
from tests.sweeps import mostly_in_sweeps


class Stacked(nn.Module):
    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.first, self.blocks = nn.Linear(10, WIDTH), nn.ModuleList(blocks)

    def through(self, rows):
        for block in self.blocks:
            rows = block(rows)
        return rows

    def forward(self, rows):
        return self.through(self.first(rows))


def assert_no_bit_changes(model, loss_of=mean_square):
    for level in LEVELS:
        plain, left = steps_at(level, model, loss_of)
        assert plain.differences(left) == []


def retrying(model, level):
    """Run a step, and restart it whenever a block is excluded or something is learned about it."""
    before = copy.deepcopy(model.state_dict())
    for _ in range(10):
        try:
            return take_step(model, mean_square, level)
        except LeftOutError:
            model.load_state_dict(before)
            model.zero_grad()
    raise AssertionError("it never ends")


# Each model at one level, a few at all; `make sweeps` runs every model at every level.
SOME = {
    *((name, LEVELS[number % 3]) for number, name in enumerate(MODELS)),
    *(("batchnorm", level) for level in LEVELS),
}


@pytest.mark.parametrize(("name", "level"), mostly_in_sweeps(MODELS, LEVELS, quick=SOME))
def test_savers_change_no_bit(name, level):
    one, other = MODELS[name](), MODELS[name]()
    plain = take_step(one, mean_square, Level())
    left = retrying(other, level_of(level, other, generators=Reach({"": other}).generators))
    assert plain.differences(left) == []
    assert left.peak_bytes < 0.9 * plain.peak_bytes


def test_block_that_changes_large_buffer_is_rejected():
    model = MODELS["codebook"]()
    level = level_of("recompute", model)
    for block in (1, 2):
        with pytest.raises(StrayedError, match=rf"^{block} writes into a buffer of 76800 bytes$"):
            take_step(model, mean_square, level)


class ChangesArgument(Block):
    def forward(self, rows, given):  # type: ignore[override]
        given.append(rows) if isinstance(given, list) else setattr(given, "last", rows)
        return super().forward(rows)


class Passing(Stacked):
    def __init__(self, kind):
        super().__init__(ChangesArgument(), ChangesArgument())
        self.kind = kind

    def forward(self, rows):
        rows, given = self.first(rows), self.kind()
        for block in self.blocks:
            rows = block(rows, given)
        return rows


@pytest.mark.parametrize("kind", [list, type("Box", (), {})])
def test_mutated_block_arguments_are_restored_for_recompute(kind):
    assert_no_bit_changes(Passing(kind))


def test_block_used_several_times():
    block = Block(nn.Dropout(0.2))
    assert_no_bit_changes(Stacked(block, block, Block()))


def test_second_derivatives():
    def loss_of(model):
        rows = batch().requires_grad_()
        output = model(rows).double().square().mean()
        (slope,) = torch.autograd.grad(output, rows, create_graph=True)
        return output + slope.double().square().sum()

    assert_no_bit_changes(MODELS["plain"](), loss_of)


def test_backward_through_retained_graph():
    def loss_of(model):
        loss = mean_square(model)
        loss.backward(retain_graph=True)
        return loss

    assert_no_bit_changes(MODELS["dropout"](), loss_of)


def test_hooks_of_blocks_run_once():
    model, calls = MODELS["plain"](), list[str]()
    block = model[1]  # type: ignore[index]
    block.register_forward_pre_hook(lambda *_: calls.append("before"))
    block.register_forward_hook(lambda *_: calls.append("after"))
    block.register_full_backward_hook(lambda *_: calls.append("backward"))
    take_step(model, mean_square, level_of("recompute", model), microbatches=1)
    assert calls == ["before", "after", "backward"]


def test_model_is_restored_after_level():
    model: Any = MODELS["batchnorm"]()
    block, keys = model[1], list(model.state_dict())
    block.forward = own = block.forward
    level = level_of("recompute + offload", model)
    with level.applied():
        assert list(model.state_dict()) == keys
        assert block.forward is not own
        assert inspect.signature(block.forward) == inspect.signature(own)
    assert block.forward is own
    del block.forward
    with pytest.raises(ZeroDivisionError), level.applied():
        raise ZeroDivisionError
    assert not any("forward" in vars(module) for module in model.modules())
    pickle.loads(pickle.dumps(model))


def test_oom_during_recompute_is_raised():
    model = MODELS["plain"]()
    level = level_of("recompute", model)
    for _ in range(2):  # the first step compares tensors
        peak = take_step(model, mean_square, level, microbatches=1).peak_bytes
        model.zero_grad()
    limited = MemoryBudget(peak - 1000).track(model)
    with pytest.raises(torch.OutOfMemoryError), limited, level.applied():
        mean_square(model).backward()
    model.zero_grad()
    assert not any("forward" in vars(module) for module in model.modules())


def test_block_error_during_recompute_is_raised():
    now = Outside(fails=False)

    class Failing(Block):
        """Fails in its second forward, after it has saved some tensors."""

        def forward(self, rows):
            found = self.up(rows).sin()
            if now.fails:
                raise KeyError("gone")
            return super().forward(rows) + found.mean()

    level = level_of("recompute", model := stack(Failing))
    with level.applied():
        loss = mean_square(model)
        now.fails = True
        with pytest.raises(KeyError, match="gone") as raised:
            loss.backward()
    assert "was recomputed in the backward" in raised.value.__notes__[0]
    assert "(4)" in level.savers[0].describe()


def test_no_grad_forward_keeps_no_graph():
    model = MODELS["dropout"]()
    with level_of("recompute", model).applied(), torch.no_grad():
        assert not model(batch()).requires_grad


def test_blocks_with_gradient_checkpointing_are_skipped():
    model: Any = MODELS["plain"]()
    model[1].gradient_checkpointing = True
    assert "(3)" in level_of("recompute", model).savers[0].describe()
    for block in model[2:5]:
        block.gradient_checkpointing = True
    with pytest.raises(ValueError, match="already recompute in the backward"):
        level_of("recompute", model, "recompute")


class Silent(nn.Module):
    """Adds noise in training, and saves nothing for the backward."""

    def forward(self, rows):
        return rows + torch.randn_like(rows) if self.training else rows


def other_parameters(model, rows):
    for block in model.blocks:
        twice = {name: 2 * each for name, each in block.named_parameters()}
        rows = torch.func.functional_call(block, twice, (rows,))
    return rows


def other_mode(model, rows):
    model.eval()
    quiet = model.through(rows)
    model.train()
    return quiet + model.through(rows)


def frozen(model, rows):
    model.blocks[1].requires_grad_(False)
    rows = model.through(rows)
    model.blocks[1].requires_grad_(True)
    return rows


@pytest.mark.parametrize("function", [other_parameters, other_mode, frozen])
def test_context_of_forward_is_restored_for_recompute(function):
    class Around(Stacked):
        def forward(self, rows):
            return function(self, self.first(rows))

    model = Around(*(Block(Silent()) for _ in range(3)))
    plain, left = steps_at("recompute", model, mean_square)
    assert plain.differences(left) == []
    assert left.peak_bytes < 0.9 * plain.peak_bytes


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_model_with_its_own_checkpoints(is_reentrant, caplog):
    class Own(Stacked):
        def forward(self, rows):
            rows = self.first(rows)
            for pair in (self.blocks[:2], self.blocks[2:]):
                rows = checkpoint(nn.Sequential(*pair), rows, use_reentrant=is_reentrant)
            return rows

    assert_no_bit_changes(Own(*(Block(nn.BatchNorm1d(WIDTH)) for _ in range(4))))
    told = [each for each in caplog.messages if "in a checkpoint of the model" in each]
    assert len(told) == (0 if is_reentrant else 8)


class WritesIntoInput(Block):
    def forward(self, rows):
        return super().forward(rows.mul_(0.5))


class Transforming(Block):
    def forward(self, rows):
        slopes = torch.func.vmap(torch.func.grad(lambda row: self.up(row).sin().sum()))(rows)
        return super().forward(rows) + slopes


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, rows):
        return self.act(self.act(rows + 1) + 1)


class Adding(Stacked):
    def through(self, rows):
        for block in self.blocks:
            rows += block(rows)
        return rows


# State that blocks share outside of their arguments; no capture reaches the second.
NOTES, UNSEEN = type("Notes", (), {"step": 0})(), Outside(step=0)


class Steps(Block):
    """Depends on an object that its caller changes between blocks."""

    notes: Any = NOTES

    def forward(self, rows):
        return super().forward(rows * (1 + self.notes.step))


class UnseenSteps(Steps):
    notes = UNSEEN


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, one, other):
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * ctx.saved_tensors[1], gradients[0] * ctx.saved_tensors[0]


class AsksTwice(Block):
    def forward(self, rows):
        return Product.apply(super().forward(rows), rows.sin())


class Catches(Block):
    """Catches the exception that ends its second forward early."""

    def forward(self, rows):
        try:
            return super().forward(rows).sin() * rows.cos()
        except Exception:
            return super().forward(rows).exp() * rows.cos()


class Noting(Stacked):
    def __init__(self, make):
        super().__init__(*(make() for _ in range(3)))

    def through(self, rows):
        for step, block in enumerate(self.blocks):
            NOTES.step = UNSEEN.step = step
            rows = block(rows)
        return rows


@pytest.mark.parametrize(
    ("make", "levels", "why"),
    [
        (lambda: stack(Transforming, 2), LEVELS[:1], "runs transforms of torch.func"),
        (lambda: stack(WritesIntoInput, 2), LEVELS[:1], "a tensor that is changed in place, by"),
        (lambda: Adding(*(Shifted() for _ in range(3))), LEVELS[::2], "changed in place, by"),
        (lambda: Noting(UnseenSteps), LEVELS[::2], "blocks.1 .* something else the second time"),
        (lambda: Noting(AsksTwice), LEVELS[::2], "blocks.2 .* x, y = ctx.saved_tensors"),
        (lambda: Noting(Catches), LEVELS[:1], "computes something else the second time"),
    ],
)
def test_blocks_unsuitable_for_recompute_are_skipped_by_name(make, levels, why, caplog):
    for name in levels:
        caplog.clear()
        model = make()
        other = copy.deepcopy(model)
        level = level_of(name, other)
        for _ in range(2):  # nothing is compared the second time
            plain = take_step(model, mean_square, Level())
            assert plain.differences(retrying(other, level)) == []
            model.zero_grad()
            other.zero_grad()
        assert re.search(why, caplog.text)


def test_shared_state_of_blocks_is_restored_for_recompute(caplog):
    assert_no_bit_changes(Noting(Steps))
    assert NOTES.step == 2
    assert not any("not recomputed" in each for each in caplog.messages)


def test_recomputed_tensors_are_compared_rarely(monkeypatch):
    model, counts, saved = Noting(Steps), list[int](), list[Tensor]()
    level = level_of("recompute", model)

    def add(_, tensor):
        saved.append(tensor)
        return tensor

    monkeypatch.setattr(_Saved, "add", add)
    for _ in range(18):
        take_step(model, mean_square, level)
        counts.append(len(saved))
        saved.clear()
    assert [at for at, count in enumerate(counts) if count] == [0, 16]


def test_block_with_sparse_buffer():
    class Graph(Block):
        edges: Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("edges", torch.eye(ROWS).to_sparse_coo(), persistent=False)

        def forward(self, rows):
            return super().forward(torch.sparse.mm(self.edges, rows))

    assert_no_bit_changes(stack(Graph))


def test_offloading_function_transforms_raises_error():
    model = stack(Transforming, 2)
    with pytest.raises(RuntimeError, match="Leave 'offload' out of when_too_large"):
        take_step(model, mean_square, level_of("offload", model))
