"""Checks on a few rows: their findings, frequency, cost and side effects."""

import copy
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automicro import (
    BufferWarning,
    FitSummary,
    LossAverageWarning,
    LossError,
    Microbatcher,
    RollbackError,
    StateWarning,
    Trainer,
    is_extra_pass,
    register_batch_type,
    verify,
)
from automicro.checking.draws import CollectiveError, HeldDraws
from automicro.transaction.rng import RandomState
from tests.checking.told import warnings_of
from tests.outside import Outside


def net(*sizes: int) -> Any:
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(sizes):
        layers += [nn.Linear(one, other), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def rows(count: int = 12, width: int = 6) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64)


def test_padded_batch_is_checked_between_inconclusive_checks() -> None:
    def forward(m: Any, batch: Any) -> Any:
        return F.cross_entropy(m(batch[0]).flatten(0, 1), batch[1].flatten())

    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)).double()
    microbatcher = Microbatcher(model, forward=forward, microbatch_size=2)
    ids = torch.randint(1, 20, (8, 6))
    whole, padded = (ids, ids), (ids, torch.where(torch.arange(6) < ids[:, :1] % 6 + 1, ids, -100))
    equal = tuple(each[:1].expand(8, 6).clone() for each in whole)  # these rows show no difference
    assert warnings_of(microbatcher, whole, equal) == []
    (message,) = warnings_of(microbatcher, padded)  # the third batch, without a scheduled check
    assert "splitting changes this batch: the gradient of" in message


# Undetectable differences are reported


@pytest.mark.parametrize("draw", [np.random.rand, random.random])
def test_uncontrolled_random_draws_warn_with_both_remedies(draw: Any) -> None:
    def forward(m: Any, batch: Any) -> Any:
        noise = torch.tensor([draw() for _ in batch[0]])
        return ((m(batch[0]) - batch[1]).square().mean(1) * noise).mean()

    microbatcher = Microbatcher(net(6, 6), forward=forward, microbatch_size=4)
    (message,) = warnings_of(microbatcher, (rows(), rows()))
    assert "could not check the assumption that the loss is a mean over samples" in message
    assert "loss_average=" in message
    assert "automicro.verify" in message
    assert microbatcher.loss_average_is == "unchecked"


def test_loss_without_gradient_warns_after_several_checks() -> None:
    model = net(6, 6)
    microbatcher = Microbatcher(model, forward=lambda m, b: m(b[0]).sum() * 0.0, microbatch_size=4)
    messages = warnings_of(microbatcher, *[(rows(), rows())] * 20)
    assert len(messages) == 1
    assert "no gradient reaches any parameter" in messages[0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_rows_are_checked(layout: torch.layout) -> None:
    def ignoring(model: Any, batch: Any) -> Tensor:
        outputs = torch.sparse.mm(batch[0], model.weight.T) + model.bias
        return F.cross_entropy(outputs, batch[1], ignore_index=0)

    model = nn.Linear(6, 3).double()
    batch = rows(6).relu().to_sparse(layout=layout), torch.tensor([0, 1, 2, 1, 0, 0])
    microbatcher = Microbatcher(model, forward=ignoring, microbatch_size=2)
    (message,) = warnings_of(microbatcher, batch)
    assert "splitting changes this batch" in message


class Hidden:
    """A batch type that can only take contiguous rows."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets


@pytest.fixture
def hidden() -> Callable[[], Hidden]:
    register_batch_type(
        Hidden,
        num_rows=lambda hidden: len(hidden.inputs),
        take=lambda hidden, start, stop: Hidden(
            hidden.inputs[start:stop], hidden.targets[start:stop]
        ),
    )

    return lambda: Hidden(rows(30), rows(30))


def test_failed_check_warns_immediately(hidden: Callable[[], Hidden]) -> None:
    def forward(model: Any, batch: Hidden) -> Tensor:
        return F.mse_loss(model(batch.inputs), batch.targets)

    microbatcher = Microbatcher(net(6, 6), forward=forward, microbatch_size=8)
    (message,) = warnings_of(microbatcher, *[hidden()] * 9)
    assert "a check of a few rows failed (" in message
    assert "concat=..." in message


def test_whole_batch_is_compared_when_row_check_fails(
    hidden: Callable[[], Hidden],
) -> None:
    def forward(model: Any, batch: Hidden) -> Tensor:
        return F.mse_loss(model(batch.inputs), batch.targets) ** 2

    microbatcher = Microbatcher(net(6, 6), forward=forward, microbatch_size=8)
    _, message = warnings_of(microbatcher, hidden())
    assert "splitting changes this batch: the " in message
    assert "for 30 rows in 4 parts" in message


def test_rows_that_fail_alone_are_named_with_error() -> None:
    def masked(model: Any, batch: Any) -> Tensor:
        scores = (batch["x"] @ batch["x"].transpose(1, 2)).masked_fill(batch["mask"], -9e9)
        return F.mse_loss(model(scores.softmax(-1) @ batch["x"]), batch["y"])

    batch = {
        "x": torch.randn(6, 6, 4, dtype=torch.float64),
        "mask": torch.ones(6, 6, dtype=torch.bool).triu(1),
        "y": torch.randn(6, 6, 3, dtype=torch.float64),
    }
    microbatcher = Microbatcher(net(4, 3), forward=masked)
    (message,) = warnings_of(microbatcher, batch)
    assert "the whole batch has a loss, and rows such as" in message
    assert "have none on their own (RuntimeError" in message


def test_collective_in_local_check_raises() -> None:
    draws = HeldDraws(is_alone=True)

    operation = torch.ops._c10d_functional.all_reduce.default
    with pytest.raises(CollectiveError, match="all_reduce"):
        draws.run(operation, (), (torch.ones(2), "sum", ""), {})


def test_second_cut_detects_loss_that_first_cut_misses() -> None:
    def hardest_half(m: Any, batch: Any) -> Any:
        losses = (m(batch[0]) - batch[1]).square().mean(1)
        return losses.topk(max(1, len(losses) // 2)).values.mean()

    for seed in range(20):
        torch.manual_seed(seed)
        microbatcher = Microbatcher(net(6, 6), forward=hardest_half, microbatch_size=1)
        assert warnings_of(microbatcher, *[(rows(6), rows(6)) for _ in range(2)]), seed


def test_unrestorable_state_after_check_only_warns() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.bank = net(6, 6), torch.zeros(2**22 + 1)  # over 16 MiB, and not a buffer

        def forward(self, inputs: Tensor) -> Any:
            self.bank[0] += 1
            return self.net(inputs)

    microbatcher = Microbatcher(Remembers(), loss_fn=nn.MSELoss(), microbatch_size=None)
    microbatcher.backward((rows(), rows()))
    microbatcher = Microbatcher(Remembers(), loss_fn=nn.MSELoss(), microbatch_size=6)
    with pytest.warns(StateWarning, match="rows could not restore everything .bank: it was "):
        microbatcher.backward((rows(), rows()))


# Confidence in the loss average


def test_result_states_confidence_in_loss_average() -> None:
    batch = (rows(), rows())
    mean = lambda m, b: F.mse_loss(m(b[0]), b[1])  # noqa: E731
    sure = {
        "read": {"loss_fn": nn.MSELoss()},
        "declared": {"forward": mean, "loss_average": "samples"},
        "checked": {"forward": mean},
        "unchecked": {"forward": mean, "probe": False},
    }
    for expected, options in sure.items():
        microbatcher = Microbatcher(net(6, 6), microbatch_size=4, **options)  # type: ignore[arg-type]
        assert microbatcher.backward(batch).loss_average_is == expected


def test_fit_summary_and_verify_state_confidence_in_average() -> None:
    model = net(6, 6)
    trainer = Trainer(
        model,
        [(rows(), rows())],
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        microbatch_size=4,
        progress=False,
    )
    summary = trainer.fit()
    assert isinstance(summary, FitSummary)
    assert summary.loss_average_is == "read"
    assert "known from the loss or the model" in str(summary)
    report = verify(model, (rows(), rows()), forward=lambda m, b: F.mse_loss(m(b[0]), b[1]))
    assert report.loss_average_is == "checked"
    assert "The average of the loss: checked" in str(report)


# Cost of a check


class Counted(nn.Module):
    """A model whose calls are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(6, 6)

    def forward(self, inputs: Tensor) -> Any:
        return self.net(inputs)


def test_check_makes_three_passes_at_powers_of_two() -> None:
    class Tally:
        def __enter__(self) -> "Tally":
            self.seen = Outside(lengths=[])
            self.handle = nn.modules.module.register_module_forward_hook(self.count)
            return self

        def count(self, module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(module, Counted) and is_extra_pass():
                self.seen.lengths.append(len(args[0]))

        def __exit__(self, *_: object) -> None:
            self.handle.remove()

    microbatcher = Microbatcher(
        Counted(), forward=lambda m, b: F.mse_loss(m(b[0]), b[1]), microbatch_size=16
    )
    batch = (rows(64), rows(64))
    with Tally() as tally:
        for _ in range(40):
            microbatcher.backward(batch)
    whole = [64, 16, 16, 16, 16]  # and its microbatches, at the split batches 1, 2 and 10
    lengths, few = list(tally.seen.lengths), list[list[int]]()
    assert [lengths[3:8], lengths[11:16], lengths[22:27]] == [whole] * 3
    del lengths[22:27], lengths[11:16], lengths[3:8]
    while lengths:
        few.append(lengths[:3])
        del lengths[:3]
    assert len(few) == 6  # at batches 1, 2, 4, 8, 16 and 32, with different rows each time
    assert all(each[0] == each[1] + each[2] == 16 for each in few)


def test_inconclusive_checks_repeat_at_powers_of_two() -> None:
    seen, number = Outside(batches=[]), 0

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if is_extra_pass():
            seen.batches.append(number)

    microbatcher = Microbatcher(
        net(6, 6), forward=lambda m, b: m(b[0]).sum() * 0.0, loss_average="none", microbatch_size=4
    )
    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        for number in range(1, 21):  # noqa: B007
            microbatcher.backward((rows(), rows()))
    finally:
        handle.remove()
    # Batch 10 is compared with its microbatches once more.
    assert sorted({*seen.batches}) == [1, 2, 4, 8, 10, 16]


# Checks leave no side effects


class Teacher(nn.Module):
    """A student, and a teacher whose parameters the forward updates outside autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = net(6, 4), net(6, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for one, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            one.data = one.data * 0.9 + other.data * 0.1
        return F.mse_loss(self.student(x), self.teacher(x))


def test_teacher_updated_in_forward_is_rejected_and_restored() -> None:
    model = Teacher()
    before = [(each.data_ptr(), each.clone()) for each in model.parameters()]
    microbatcher = Microbatcher(model, forward=lambda m, b: m(b), microbatch_size=3)
    with pytest.raises(RollbackError, match=r"'teacher\.0\.weight'.*a teacher, a key encoder"):
        microbatcher.backward(rows())
    for now, (place, values) in zip(model.parameters(), before, strict=True):
        assert now.data_ptr() == place
        assert torch.equal(now, values)


def test_parameter_redrawn_in_forward_is_restored_after_verify() -> None:
    model = nn.Linear(6, 4).double()
    before = copy.deepcopy(model.state_dict())

    def forward(model: Any, batch: Tensor) -> Any:
        model.bias.data.uniform_()
        return model(batch).square().mean()

    verify(model, rows(), forward=forward)
    assert all(before[name].equal(now) for name, now in model.state_dict().items())


@pytest.mark.parametrize("limit", [9.0, 0.5])
def test_parameter_constraint_in_forward_is_allowed(limit: float) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale = net(6, 4), nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.scale.data = self.scale.data.clamp(max=limit)
            loss: Tensor = (self.net(x) * self.scale).square().mean()
            return loss

    torch.manual_seed(0)
    batch, gradients, told = rows(), list[Tensor](), list[list[Any]]()
    for size in (None, 3):
        torch.manual_seed(1)
        model = Scaled()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Microbatcher(model, forward=lambda m, b: m(b), microbatch_size=size).backward(batch)
        told.append([each for each in caught if each.category is BufferWarning])
        assert model.scale.grad is not None
        gradients.append(model.scale.grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)
    assert list(map(len, told)) == [0, int(limit < 1)]


def test_data_dependent_initialization_warns_and_is_rolled_back() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.shift = net(6, 4), nn.Parameter(torch.zeros(6, dtype=torch.float64))
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            if not self.seen:
                self.shift.data = -x.mean(0)
                self.seen.append(len(x))
            loss: Tensor = self.net(x + self.shift).square().mean()
            return loss

    model, batch = Normed(), rows()
    microbatcher = Microbatcher(model, forward=lambda m, b: m(b), microbatch_size=3)
    with pytest.warns(BufferWarning, match=r"sets parameters \('shift'\).*before the first step"):
        microbatcher.backward(batch)
    assert model.seen == [3]  # set by the first microbatch: checks have no side effect
    torch.testing.assert_close(model.shift, -batch[:3].mean(0))


def test_gradient_hooks_do_not_run_during_checks() -> None:
    model, calls = net(6, 6), list[int]()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: calls.append(1))
        parameter.register_post_accumulate_grad_hook(lambda leaf: calls.append(2))
    before = torch.randn_like(model[0].weight)
    model[0].weight.grad = before
    Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size="auto").backward((rows(), rows()))
    assert sorted(calls) == [1, 1, 2, 2]
    assert model[0].weight.grad is before


@pytest.mark.parametrize("times", [1, 2])
def test_check_that_cannot_restore_state_raises(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [torch.OutOfMemoryError("CUDA out of memory.") for _ in range(times)]
    restore = RandomState.roll_back

    def failing(state: RandomState) -> None:
        if failures:
            raise failures.pop()
        restore(state)

    monkeypatch.setattr(RandomState, "roll_back", failing)
    microbatcher = Microbatcher(net(6, 6), loss_fn=nn.MSELoss(), microbatch_size="auto")
    batch = rows(), rows()
    before = torch.get_rng_state()
    if times == 1:
        microbatcher.backward(batch)
        assert torch.equal(torch.get_rng_state(), before)
        return
    with pytest.raises(RollbackError, match="a check could not restore the state before it"):
        microbatcher.backward(batch)


def own_seed(model: Any, batch: Any) -> Tensor:
    noise = torch.randn(batch[0].shape, generator=torch.Generator().manual_seed(42))
    return F.mse_loss(model(batch[0] + noise), batch[1])


def seed_of_the_batch(model: Any, batch: Any) -> Tensor:
    own = torch.Generator().manual_seed(batch[2])
    permuted = torch.randperm(len(batch[0]), generator=own)
    return F.mse_loss(model(batch[0] + (0.0 * permuted)[:, None]), batch[1])


@pytest.mark.parametrize("forward", [own_seed, seed_of_the_batch])
def test_forward_that_reseeds_generator_warns(forward: Any) -> None:
    microbatcher = Microbatcher(net(6, 6), forward=forward, microbatch_size=4)
    (message,) = warnings_of(microbatcher, *[(rows(), rows(), 3)] * 3)
    assert "sets the seed of its random draws" in message
    assert microbatcher.loss_average_is == "wrong"


def test_evaluation_that_reseeds_generator_warns() -> None:
    microbatcher = Microbatcher(net(6, 6), forward=own_seed, eval_microbatch_size=4)
    with pytest.warns(LossAverageWarning, match="sets the seed"):
        microbatcher.evaluate((rows(), rows()))


class Noisy(nn.Module):
    """Has a private generator that continues from state to state, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(net(6, 6), nn.Dropout(0.5), nn.Linear(6, 6).double())
        self.drawn = torch.Generator().manual_seed(42)

    def forward(self, inputs: Tensor) -> Any:
        return self.inner(inputs + torch.randn(inputs.shape, generator=self.drawn))


def fixed_projection(model: Any, batch: Any) -> Tensor:
    drawn = torch.Generator().manual_seed(42)
    return F.mse_loss(model(batch[0] @ torch.randn(6, 6, generator=drawn).double()), batch[1])


def seed_of_each_row(model: Any, batch: Any) -> Tensor:
    noise = [
        torch.randn(6, generator=torch.Generator().manual_seed(int(seed))) for seed in batch[2]
    ]
    return F.mse_loss(model(batch[0] + torch.stack(noise)), batch[1])


def checkpointed(model: Any, batch: Any) -> Tensor:
    hidden = checkpoint(model.inner[0], batch[0], use_reentrant=False)
    hidden = checkpoint(model.inner[1:], hidden, use_reentrant=False)
    return F.mse_loss(hidden, batch[1])


def generator_of_the_batch(model: Any, batch: Any) -> Tensor:
    noise = torch.randn(batch[0].shape, generator=batch[3])
    return F.mse_loss(model(batch[0] + noise), batch[1])


def no_draw_after_a_seed(model: Any, batch: Any) -> Tensor:
    torch.manual_seed(42)
    return F.mse_loss(model.inner[0](batch[0]), batch[1])


def temporarily_seeded(model: Any, batch: Any) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(42)
        scale = torch.rand(6).double()
    return F.mse_loss(model(batch[0] * scale), batch[1])


@pytest.mark.parametrize(
    "forward",
    [
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        fixed_projection,
        seed_of_each_row,
        checkpointed,
        generator_of_the_batch,
        no_draw_after_a_seed,
        temporarily_seeded,
    ],
)
def test_row_independent_random_draws_give_no_warning(forward: Any) -> None:
    batch = rows(), rows(), torch.arange(12), torch.Generator().manual_seed(42)
    microbatcher = Microbatcher(Noisy(), forward=forward, microbatch_size=4)
    assert not warnings_of(microbatcher, *[batch] * 9)
    assert "sets the seed" not in str(verify(Noisy(), batch, forward=forward))


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "normal": lambda h: torch.distributions.Normal(h, h.exp()).rsample(),
    "noise": lambda h: (
        (h + torch.randn_like(h)) * torch.rand(len(h), 1) + torch.bernoulli(h.sigmoid())
    ),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, True),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "gumbel": F.gumbel_softmax,
    "beta": lambda h: h + torch.distributions.Beta(2.0, 2.0).sample((len(h), 1)),
    "dirichlet": lambda h: h + torch.distributions.Dirichlet(torch.ones(8)).sample((len(h),)),
    "student": lambda h: h + torch.distributions.StudentT(3.0).sample(h.shape),
    "binomial": lambda h: h + torch.distributions.Binomial(5, torch.full_like(h, 0.3)).sample(),
    "poisson": lambda h: h + torch.poisson(h.abs()),
    "time steps": lambda h: h * torch.randint(9, (len(h), 1)),
    "stochastic depth": lambda h: h * torch.empty(len(h), 1).bernoulli_(0.8),
    "one sample": lambda h: h * torch.multinomial(h.softmax(1), 1),
    "attention": lambda h: F.scaled_dot_product_attention(
        h[:, None], h[:, None], h[:, None], dropout_p=0.5
    ),
}


def test_held_draws_of_row_are_independent_of_other_rows() -> None:
    inputs = torch.randn(6, 8)
    for name, draw in DRAWS.items():
        with HeldDraws() as draws:
            together = draw(inputs)
            apart = torch.cat([draw(part) for part in inputs.split([4, 2])])
        assert torch.allclose(together, apart, atol=1e-6), name
        assert draws.drawn, name
        assert not draws.unheld, name
    with HeldDraws() as draws:
        torch.ones(3).multinomial(2)
    assert draws.unheld == {"torch.multinomial"}


class AtThreshold(nn.Module):
    """A ReLU so near zero that rounding decides, and kernels round differently for other rows."""

    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        self.edge = nn.Parameter(torch.ones(()), requires_grad=is_trained)
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        rounding = 1e-7 if len(x) < 8 and bool((x[:, 0] > 5).any()) else -1e-7
        is_over = (self.edge - 1 + rounding > 0).float()
        return self.outer(self.inner(x) * (1 + 1e-3 * is_over))


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("num_rows", [24, 48])
def test_rounding_at_relu_threshold_gives_no_warning(is_trained: bool, num_rows: int) -> None:
    """Only parameters that are off by rounding expose it, not other rows."""
    torch.manual_seed(0)
    x, y = torch.randn(num_rows, 8), torch.randn(num_rows, 1)
    x[0, 0] = 6.0  # an extreme row, which the check selects
    microbatcher = Microbatcher(AtThreshold(is_trained=is_trained), loss_fn=nn.MSELoss())
    found = warnings_of(microbatcher, (x, y))
    assert found == []


class Choices(nn.Module):
    """Score choices from small features; the softmax cancels the bias."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8, dtype=dtype), nn.Linear(8, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(1e-4 * torch.tanh(self.body(x)))
        return scores.squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_canceling_gradient_is_treated_as_rounding(
    dtype: torch.dtype,
) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        data = torch.randn(6, 4, 6, dtype=dtype), torch.randint(4, (6,))
        step = Microbatcher(Choices(dtype), loss_fn=nn.CrossEntropyLoss(), microbatch_size=2)
        assert warnings_of(step, data) == []


def test_torch_warnings_about_single_row_are_suppressed() -> None:
    def forward(model: Any, batch: Any) -> Any:
        return F.mse_loss(model(batch[0]), batch[1]) + model[0].weight.sum() * batch[1].std()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Microbatcher(net(6, 6), forward=forward).backward((rows(4), rows(4, 1)))
    assert not [each for each in caught if "degrees of freedom" in str(each.message)]


def test_user_warnings_during_check_are_shown() -> None:
    def forward(model: Any, batch: Any) -> Any:
        if is_extra_pass():
            warnings.warn("a look of few rows", UserWarning, stacklevel=1)
        return F.mse_loss(model(batch[0]), batch[1])

    with pytest.warns(UserWarning, match="few rows"):
        Microbatcher(net(6, 6), forward=forward).backward((rows(), rows()))


def test_new_leaf_tensors_do_not_hide_wrong_average() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def forward(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0].clone().requires_grad_()  # as speech models do for checkpointing
        return F.cross_entropy(model(inputs), batch[1], reduction="sum")

    microbatcher = Microbatcher(model, forward=forward, microbatch_size=4)
    with pytest.warns(LossAverageWarning, match="splitting changes this batch") as told:
        microbatcher.backward((torch.randn(12, 4), torch.randint(3, (12,))))
    assert not any("failed" in str(each.message) for each in told)
    assert microbatcher.loss_average_is == "wrong"


# Graphs built by the caller


class Queries(nn.Module):
    """Compare rows with a tensor that the caller computed with a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.last = net(6, 6), net(6, 6)
        self.given: Any = None


def _in_closure(model: Any, batch: Any, given: Tensor) -> Any:
    hidden = model.encoder(batch[0])
    return lambda m, b: F.mse_loss(m.last(m.encoder(b[0])) @ given.T, hidden[: len(b[0])].detach())


def _on_module(model: Any, batch: Any, given: Tensor) -> Any:
    model.given = {"weights": [given]}
    return lambda m, b: F.mse_loss(m.last(m.encoder(b[0])) @ m.given["weights"][0].T, b[1])


def _by_another_loss(model: Any, batch: Any, given: Tensor) -> Any:
    penalty = given.square().mean()
    return lambda m, b: F.mse_loss(m.last(m.encoder(b[0])), b[1]) + penalty


def _in_batch(model: Any, batch: Any, given: Tensor) -> Any:
    return lambda m, b: F.mse_loss(m.last(b[0]) @ b[2].T, b[1])


@pytest.mark.parametrize("use", [_in_closure, _on_module, _by_another_loss, _in_batch])
def test_check_does_not_backpropagate_through_graph_of_caller(use: Any) -> None:
    inputs, targets, classes = rows(), rows(), rows(6)
    weights, times = [], []
    for is_ours in (False, True):
        torch.manual_seed(1)
        model, calls = Queries(), list[Tensor]()
        given = model.encoder(classes)  # uses weights that the forward uses, too
        given.register_hook(calls.append)
        batch: Any = (model.encoder(inputs) if use is _in_batch else inputs, targets)
        batch += (given,) if use is _in_batch else ()
        forward = use(model, (inputs, targets), given)
        if is_ours:
            layout = {"2": "shared"} if use is _in_batch else 0
            Microbatcher(model, forward=forward, batch_layout=layout).backward(batch)
        else:
            forward(model, batch).backward()
        weights.append([each.grad for each in model.parameters()])
        times.append(len(calls))
    assert times == [1, 1]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_rows_attached_to_graph_are_checked_without_it() -> None:
    encoder, model = net(6, 6), net(6, 3)
    microbatcher = Microbatcher(model, forward=lambda m, b: m(b).square().mean())
    for _ in range(2):
        assert microbatcher.backward(encoder(rows())).ooms == 0
    assert microbatcher.loss_average_is == "checked"
    assert all(each.grad is not None for each in encoder.parameters())


def test_graph_shared_by_microbatches_raises_with_advice() -> None:
    outer, model = net(6, 6), net(6, 6)
    given, batch = outer(rows(6)), rows()

    def forward(model: Any, batch: Tensor) -> Any:
        return (model(batch) @ given).square().mean()

    with pytest.raises(RuntimeError, match="second time") as caught:
        Microbatcher(model, forward=forward, microbatch_size=4).backward(batch)
    assert "compute it inside forward=…, .detach() it" in "".join(caught.value.__notes__)
    given = outer(rows(6))
    with pytest.raises(LossError, match=r"built before the forward \(AddmmBackward0\).*\.detach"):
        verify(model, batch, forward=forward)
    given.sum().backward()  # its graph is still intact


def test_gradient_computed_inside_forward_is_checked() -> None:
    model = net(6, 8, 1)

    def penalty(model: Any, batch: Tensor) -> Any:
        inputs = batch.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    microbatcher = Microbatcher(model, forward=penalty, microbatch_size=4)
    assert warnings_of(microbatcher, rows(), rows()) == []
    assert microbatcher.loss_average_is == "checked"
