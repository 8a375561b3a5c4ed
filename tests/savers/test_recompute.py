"""Blocks that are recomputed in the backward give bit-identical results."""

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automicro.memory.budget import MemoryBudget
from automicro.ranks.interface import StrayedError
from automicro.reach import Reach
from automicro.savers.levels import Level
from automicro.savers.recompute import Block as Recomputed
from automicro.savers.recompute import LeftOutError, Recompute, _Saved
from automicro.transaction.rng import RandomState
from tests.outside import Outside
from tests.savers.models import MODELS, ROWS, WIDTH, Block, Codebook, batch_for, stack
from tests.savers.steps import LEVELS, differences, level_of, steps_at, take_step
from tests.sweeps import mostly_in_sweeps


def mean_square(rows: Tensor) -> Any:
    return lambda model: model(rows).double().square().mean()


class Stacked(nn.Module):
    """A layer followed by blocks."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(10, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def through(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows

    def forward(self, rows: Tensor) -> Tensor:
        return self.through(self.first(rows))


def assert_no_bit_changes(make: Callable[[], nn.Module], loss_of: Any = None) -> None:
    for level in LEVELS:
        loss = loss_of or mean_square(batch_for("plain"))
        assert differences(*steps_at(level, make(), loss)) == []


def retrying(model: nn.Module, loss_of: Any, level: Level) -> Any:
    """Run a step, and restart it whenever a block is excluded or something is learned about it."""
    before = copy.deepcopy(model.state_dict())
    for _ in range(10):
        try:
            return take_step(model, loss_of, level)
        except LeftOutError:
            model.load_state_dict(before)
            model.zero_grad()
    raise AssertionError("it never ends")


# Each model at one level, a few at all; `make sweeps` runs every model at every level.
SOME = {
    *((name, LEVELS[number % 3]) for number, name in enumerate(MODELS)),
    *((name, level) for name in ("dropout", "batchnorm") for level in LEVELS),
}


@pytest.mark.parametrize(("name", "level"), mostly_in_sweeps(MODELS, LEVELS, quick=SOME))
def test_savers_change_no_bit(name: str, level: str) -> None:
    one, other, loss_of = MODELS[name](), MODELS[name](), mean_square(batch_for(name))
    plain = take_step(one, loss_of, Level())
    applied = level_of(level, other, generators=Reach({"": other}).generators)
    left = retrying(other, loss_of, applied)
    assert differences(plain, left) == []
    assert left.peak_bytes < 0.9 * plain.peak_bytes


def test_block_that_changes_large_buffer_is_rejected() -> None:
    model = stack(lambda: Block(Codebook()))
    level = level_of("recompute", model)
    rows = batch_for("codebook")
    with pytest.raises(StrayedError, match=r"^1 writes into a buffer of 76800 bytes$"):
        take_step(model, mean_square(rows), level)
    with pytest.raises(StrayedError, match=r"^2 writes"):
        take_step(model, mean_square(rows), level)


class WritesIntoInput(Block):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows.mul_(0.5))


class ChangesList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, rows: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(rows)
        found: Tensor = self.inner(rows)
        return found


class ChangesObject(ChangesList):
    def forward(self, rows: Tensor, seen: Any) -> Tensor:
        seen.last = rows
        found: Tensor = self.inner(rows)
        return found


class Box:
    last: Any = None


class Passing(Stacked):
    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first(rows)
        given: Any = [] if type(self.blocks[0]) is ChangesList else Box()
        for block in self.blocks:
            rows = block(rows, given)
        return rows


@pytest.mark.parametrize("kind", [ChangesList, ChangesObject])
def test_mutated_block_arguments_are_restored_for_recompute(kind: type[nn.Module]) -> None:
    assert_no_bit_changes(lambda: Passing(kind(), kind()))


def test_block_used_several_times() -> None:
    block = Block(nn.Dropout(0.2))
    assert_no_bit_changes(lambda: Stacked(block, block, Block()))


def test_second_derivatives() -> None:
    def loss_of(model: nn.Module) -> Tensor:
        rows = batch_for("plain").requires_grad_()
        output = model(rows).double().square().mean()
        (slope,) = torch.autograd.grad(output, rows, create_graph=True)
        found: Tensor = output + slope.double().square().sum()
        return found

    assert_no_bit_changes(MODELS["plain"], loss_of)


def test_backward_through_retained_graph() -> None:
    def loss_of(model: nn.Module) -> Tensor:
        loss: Tensor = model(batch_for("dropout")).double().square().mean()
        loss.backward(retain_graph=True)
        return loss

    assert_no_bit_changes(MODELS["dropout"], loss_of)


def test_hooks_of_blocks_run_once() -> None:
    model = MODELS["plain"]()
    calls: list[str] = []
    block = model[1]  # type: ignore[index]
    block.register_forward_pre_hook(lambda *_: calls.append("before"))
    block.register_forward_hook(lambda *_: calls.append("after"))
    block.register_full_backward_hook(lambda *_: calls.append("backward"))
    take_step(model, mean_square(batch_for("plain")), level_of("recompute", model), microbatches=1)
    assert calls == ["before", "after", "backward"]


def test_model_is_restored_after_level() -> None:
    model = MODELS["batchnorm"]()
    block = model[1]  # type: ignore[index]
    keys = list(model.state_dict())
    block.forward = own = block.forward
    level = level_of("recompute + offload", model)
    with level.applied():
        assert list(model.state_dict()) == keys
        assert block.forward is not own
    assert block.forward is own
    del block.forward
    with pytest.raises(ZeroDivisionError), level.applied():
        raise ZeroDivisionError
    assert not any("forward" in vars(module) for module in model.modules())
    pickle.loads(pickle.dumps(model))


def test_oom_during_recompute_is_raised() -> None:
    model, rows = MODELS["plain"](), batch_for("plain")
    level = level_of("recompute", model)
    for _ in range(2):  # the first step compares tensors
        peak = take_step(model, mean_square(rows), level, microbatches=1).peak_bytes
        model.zero_grad()
    limited = MemoryBudget(peak - 1000).track(model)
    with pytest.raises(torch.OutOfMemoryError), limited, level.applied():
        mean_square(rows)(model).backward()
    model.zero_grad()
    assert not any("forward" in vars(module) for module in model.modules())


def step_whose_second_forward_raises(error: Exception) -> tuple[Level, Callable[[], None]]:
    """Return a level, and a function that runs a step at it."""

    now = Outside(fails=False)

    class Failing(Block):
        """Fails in its second forward, after it has saved some tensors."""

        def forward(self, rows: Tensor) -> Tensor:
            found = self.up(rows).sin()
            if now.fails:
                raise error
            output: Tensor = super().forward(rows) + found.mean()
            return output

    model = stack(Failing)
    level = level_of("recompute", model)

    def step() -> None:
        with level.applied():
            loss = mean_square(batch_for("plain"))(model)
            now.fails = True
            loss.backward()

    return level, step


def test_no_grad_forward_keeps_no_graph() -> None:
    model = MODELS["dropout"]()
    with level_of("recompute", model).applied(), torch.no_grad():
        assert not model(batch_for("plain")).requires_grad


def test_blocks_with_gradient_checkpointing_are_skipped() -> None:
    model = MODELS["plain"]()
    model[1].gradient_checkpointing = True  # type: ignore[index]
    (saver,) = level_of("recompute", model).savers
    assert "(3)" in saver.describe()
    for block in list(model)[2:5]:  # type: ignore[call-overload]
        block.gradient_checkpointing = True
    with pytest.raises(ValueError, match="already recompute in the backward"):
        level_of("recompute", model, when_too_large="recompute")


class Silent(nn.Module):
    """Adds noise in training, and saves nothing for the backward."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows + torch.randn_like(rows) if self.training else rows


class Around(Stacked):
    """Blocks with a context that applies only during their forward."""

    def __init__(self) -> None:
        super().__init__(*(Block(Silent()) for _ in range(3)))


class OtherParameters(Around):
    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first(rows)
        for block in self.blocks:
            twice = {name: 2 * each for name, each in block.named_parameters()}
            rows = torch.func.functional_call(block, twice, (rows,))
        return rows


class OtherMode(Around):
    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first(rows)
        self.eval()
        quiet = self.through(rows)
        self.train()
        return quiet + self.through(rows)


class Frozen(Around):
    def forward(self, rows: Tensor) -> Tensor:
        self.blocks[1].requires_grad_(False)
        rows = self.through(self.first(rows))
        self.blocks[1].requires_grad_(True)
        return rows


@pytest.mark.parametrize("kind", [OtherParameters, OtherMode, Frozen])
def test_context_of_forward_is_restored_for_recompute(kind: type[Around]) -> None:
    plain, left = steps_at("recompute", kind(), mean_square(batch_for("plain")))
    assert differences(plain, left) == []
    assert left.peak_bytes < 0.9 * plain.peak_bytes


def test_parameters_are_restored_after_recompute() -> None:
    model = Frozen()
    before = [(each, each.requires_grad) for each in model.parameters()]
    take_step(model, mean_square(batch_for("plain")), level_of("recompute", model))
    assert all(
        each is now and is_trained == now.requires_grad
        for (each, is_trained), now in zip(before, model.parameters(), strict=True)
    )


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_model_with_its_own_checkpoints(
    is_reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(Stacked):
        """Recomputes pairs of blocks, and therefore updates their running means twice."""

        def __init__(self) -> None:
            super().__init__(*(Block(nn.BatchNorm1d(WIDTH)) for _ in range(4)))

        def forward(self, rows: Tensor) -> Tensor:
            rows = self.first(rows)
            for pair in (self.blocks[:2], self.blocks[2:]):
                rows = checkpoint(nn.Sequential(*pair), rows, use_reentrant=is_reentrant)
            return rows

    assert_no_bit_changes(Own)
    told = [each for each in caplog.messages if "in a checkpoint of the model" in each]
    assert len(told) == (0 if is_reentrant else 8)


class Transforming(Block):
    def forward(self, rows: Tensor) -> Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda row: self.up(row).sin().sum()))(rows)
        found: Tensor = super().forward(rows) + slopes
        return found


class Shifted(nn.Module):
    """Saves none of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.act(self.act(rows + 1) + 1)
        return found


class Adding(Stacked):
    """Adds in place to the inputs of its blocks."""

    def __init__(self) -> None:
        super().__init__(*(Shifted() for _ in range(3)))

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first(rows)
        for block in self.blocks:
            rows += block(rows)
        return rows


@pytest.mark.parametrize(
    ("make", "levels", "why"),
    [
        (lambda: stack(Transforming, 2), ["recompute"], "runs transforms of torch.func"),
        (lambda: stack(WritesIntoInput, 2), ["recompute"], "a tensor that is changed in place, by"),
        (Adding, ["recompute", "recompute + offload"], "a tensor that is changed in place, by"),
    ],
)
def test_blocks_unsuitable_for_recompute_are_skipped(
    make: Any, levels: list[str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, loss_of = make(), mean_square(batch_for("plain"))
    plain = take_step(copy.deepcopy(model), loss_of, Level())
    for level in levels:
        caplog.clear()
        other = copy.deepcopy(model)
        assert differences(plain, retrying(other, loss_of, level_of(level, other))) == []
        assert why in caplog.text


class Notes:
    """State that blocks share outside of their arguments."""

    def __init__(self) -> None:
        self.step = 0


NOTES = Notes()


class Steps(Block):
    """Depends on an object that its caller changes between blocks."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows * (1 + NOTES.step))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[1], gradients[0] * ctx.saved_tensors[0]


class AsksTwice(Block):
    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = Product.apply(super().forward(rows), rows.sin())
        return found


class Catches(Block):
    """Catches the exception that ends its second forward early."""

    def forward(self, rows: Tensor) -> Tensor:
        try:
            return super().forward(rows).sin() * rows.cos()
        except Exception:
            return super().forward(rows).exp() * rows.cos()


class Noting(Stacked):
    """Changes the shared state while blocks run, and clears it afterwards."""

    def __init__(self, make: type[Block]) -> None:
        super().__init__(*(make() for _ in range(3)))

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first(rows)
        for NOTES.step, block in enumerate(self.blocks):
            rows = block(rows)
        return rows


UNSEEN = Outside(step=0)


class UnseenSteps(Block):
    """Depends on state that no capture reaches."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows * (1 + UNSEEN.step))


class NotingUnseen(Noting):
    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first(rows)
        for UNSEEN.step, block in enumerate(self.blocks):
            rows = block(rows)
        return rows


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: NotingUnseen(UnseenSteps), "blocks.1 .* computes something else the second time"),
        (lambda: Noting(AsksTwice), "blocks.2 .* x, y = ctx.saved_tensors"),
    ],
)
def test_blocks_that_recompute_differently_are_skipped_by_name(
    make: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, loss_of = make(), mean_square(batch_for("plain"))
    plain = take_step(copy.deepcopy(model), loss_of, Level())
    for level in ("recompute", "recompute + offload"):
        caplog.clear()
        other = copy.deepcopy(model)
        assert differences(plain, retrying(other, loss_of, level_of(level, other))) == []
        assert re.search(why, caplog.text)


def test_shared_state_of_blocks_is_restored_for_recompute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for level in LEVELS:
        NOTES.step = 0
        plain, left = steps_at(level, Noting(Steps), mean_square(batch_for("plain")))
        assert differences(plain, left) == []
        assert NOTES.step == 2
    assert not any("not recomputed" in each for each in caplog.messages)


def test_block_that_fails_in_recompute_is_skipped_by_name(caplog: pytest.LogCaptureFixture) -> None:
    model, loss_of = Noting(Catches), mean_square(batch_for("plain"))
    level, other = level_of("recompute", model), copy.deepcopy(model)
    for _ in range(2):  # nothing is compared the second time
        plain = take_step(other, loss_of, Level())
        assert differences(plain, retrying(model, loss_of, level)) == []
        model.zero_grad()
        other.zero_grad()
    assert "computes something else the second time" in caplog.text


def test_block_error_during_recompute_is_raised() -> None:
    level, step = step_whose_second_forward_raises(KeyError("gone"))
    with pytest.raises(KeyError, match="gone") as raised:
        step()
    assert "was recomputed in the backward" in raised.value.__notes__[0]
    (saver,) = level.savers
    assert "(4)" in saver.describe()


def test_recomputed_tensors_are_compared_rarely() -> None:
    model, loss_of = Noting(Steps), mean_square(batch_for("plain"))
    level = level_of("recompute", model)
    saved: list[Tensor] = []

    def add(_: Any, tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Saved, "add", add)
        counts = []
        for _ in range(18):
            take_step(model, loss_of, level)
            counts.append(len(saved))
            saved.clear()
    assert [at for at, count in enumerate(counts) if count] == [0, 16]


def test_block_copied_during_forward_uses_its_own_weights() -> None:
    class Teaching(Noting):
        """Copies its blocks in the first forward, as its teacher."""

        teacher: Any = None

        def forward(self, rows: Tensor) -> Tensor:
            if self.teacher is None:
                teacher = copy.deepcopy(self.blocks)
                for parameter in teacher.parameters():
                    parameter.requires_grad_(False).mul_(1.5)
                vars(self)["teacher"] = pickle.loads(pickle.dumps(teacher))
            taught = self.first(rows)
            for block in self.teacher:
                taught = block(taught)
            found: Tensor = super().forward(rows) - taught
            return found

    assert_no_bit_changes(lambda: Teaching(Block))


def test_patched_forward_keeps_signature() -> None:
    model = MODELS["plain"]()
    block = model[1]  # type: ignore[index]
    before = inspect.signature(block.forward)
    with level_of("recompute", model).applied():
        assert inspect.signature(block.forward) == before


def test_block_with_sparse_buffer() -> None:
    class Graph(Block):
        """Mixes rows with a sparse matrix in a buffer."""

        edges: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", torch.eye(ROWS).to_sparse_coo(), persistent=False)

        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(torch.sparse.mm(self.edges, rows))

    for level in LEVELS:
        plain, left = steps_at(level, stack(Graph), mean_square(batch_for("plain")))
        assert differences(plain._replace(buffers=[]), left._replace(buffers=[])) == []


def test_offloading_function_transforms_raises_error() -> None:
    model = stack(Transforming, 2)
    with pytest.raises(RuntimeError, match="Leave 'offload' out of when_too_large"):
        take_step(model, mean_square(batch_for("plain")), level_of("offload", model))


CACHED = Outside(seen=[])


class CachingLayer(nn.Module):
    """A layer like those of transformers: attention reads its keys and values from a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx = 1
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, past_key_values: Any = None) -> tuple[Tensor, Any]:
        keys = self.linear(x).view(len(x), 3, 2, 3).transpose(1, 2)
        keys, _ = past_key_values.update(keys, keys, self.layer_idx)
        num_cached = past_key_values.get_seq_length(self.layer_idx)
        CACHED.seen.append((keys.stride(), num_cached))
        return x + keys[:, :, -3:].exp().transpose(1, 2).reshape(x.shape), past_key_values


@pytest.mark.parametrize("num_held", [0, 2])
def test_layer_cache_is_restored_for_recompute(num_held: int) -> None:
    transformers = pytest.importorskip("transformers")

    def made() -> Any:
        cache = transformers.DynamicCache()
        if num_held:
            cache.update(torch.ones(4, 2, num_held, 3), torch.ones(4, 2, num_held, 3), 1)
        return cache

    layer = CachingLayer()
    CACHED.seen.clear()
    x = torch.randn(4, 3, 6)
    layer(x, past_key_values=made())
    [(stride, num_cached)] = CACHED.seen
    assert num_cached == num_held + 3
    CACHED.seen.clear()
    cache = made()
    with Recompute([Recomputed("layer", layer)], lambda: RandomState([])).applied():
        out, given_back = layer(x, past_key_values=cache)
        assert cache.get_seq_length(1) == num_held
        out.sum().backward()
    assert given_back is cache
    assert cache.get_seq_length(1) == num_held
    assert CACHED.seen == [(stride, num_cached)] * 2
