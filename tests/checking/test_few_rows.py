"""Checks on a few rows: their findings, frequency, cost and side effects."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import (
    BufferWarning,
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


def test_uncontrolled_random_draws_warn_with_both_remedies() -> None:
    def forward(m: Any, batch: Any) -> Any:
        noise = torch.tensor([np.random.rand() for _ in batch[0]])
        return ((m(batch[0]) - batch[1]).square().mean(1) * noise).mean()

    microbatcher = Microbatcher(net(6, 6), forward=forward, microbatch_size=4)
    (message,) = warnings_of(microbatcher, (rows(), rows()))
    assert "could not check the assumption that the loss is a mean over samples" in message
    assert "loss_average=" in message
    assert "automicro.verify" in message
    assert microbatcher.loss_average_is == "unchecked"


def test_inconclusive_checks_repeat_at_powers_of_two_and_warn_once() -> None:
    seen, number = Outside(batches=[]), 0
    model = net(6, 6)
    model.register_forward_hook(lambda *_: seen.batches.append(number) if is_extra_pass() else None)
    microbatcher = Microbatcher(model, forward=lambda m, b: m(b[0]).sum() * 0.0, microbatch_size=4)
    messages = []
    for number in range(1, 21):  # noqa: B007
        messages += warnings_of(microbatcher, (rows(), rows()))
    (message,) = messages
    assert "no gradient reaches any parameter" in message
    # Batch 10 is compared with its microbatches once more.
    assert sorted({*seen.batches}) == [1, 2, 4, 8, 10, 16]


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


def test_whole_batch_is_compared_when_row_check_fails() -> None:
    register_batch_type(
        Hidden,
        num_rows=lambda hidden: len(hidden.inputs),
        take=lambda hidden, start, stop: Hidden(
            hidden.inputs[start:stop], hidden.targets[start:stop]
        ),
    )

    def forward(model: Any, batch: Hidden) -> Tensor:
        return F.mse_loss(model(batch.inputs), batch.targets) ** 2

    microbatcher = Microbatcher(net(6, 6), forward=forward, microbatch_size=8)
    failed, wrong = warnings_of(microbatcher, *[Hidden(rows(30), rows(30)) for _ in range(9)])
    assert "a check of a few rows failed (" in failed
    assert "concat=..." in failed
    assert "splitting changes this batch: the " in wrong
    assert "for 30 rows in 4 parts" in wrong


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


def test_unrestorable_state_after_check_only_warns() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.bank = net(6, 6), torch.zeros(2**22 + 1)  # over 16 MiB, and not a buffer

        def forward(self, inputs: Tensor) -> Any:
            self.bank[0] += 1
            return self.net(inputs)

    Microbatcher(Remembers(), loss_fn=nn.MSELoss(), microbatch_size=None).backward((rows(), rows()))
    microbatcher = Microbatcher(Remembers(), loss_fn=nn.MSELoss(), microbatch_size=6)
    with pytest.warns(StateWarning, match="rows could not restore everything .bank: it was "):
        microbatcher.backward((rows(), rows()))


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


def test_fit_summary_states_confidence_in_average() -> None:
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "progress": False}
    trainer = Trainer(net(6, 6), [(rows(), rows())], loss_fn=nn.MSELoss(), **options)
    summary = trainer.fit()
    assert summary.loss_average_is == "read"
    assert "known from the loss or the model" in str(summary)


def test_check_makes_three_passes_at_powers_of_two() -> None:
    seen, model = Outside(lengths=[]), net(6, 6)

    def count(module: nn.Module, args: Any, output: Any) -> None:
        if is_extra_pass():
            seen.lengths.append(len(args[0]))

    model.register_forward_hook(count)
    step = Microbatcher(model, forward=lambda m, b: F.mse_loss(m(b[0]), b[1]), microbatch_size=16)
    batch = (rows(64), rows(64))
    for _ in range(40):
        step.backward(batch)
    whole = [64, 16, 16, 16, 16]  # and its microbatches, at the split batches 1, 2 and 10
    lengths = list(seen.lengths)
    assert [lengths[3:8], lengths[11:16], lengths[22:27]] == [whole] * 3
    del lengths[22:27], lengths[11:16], lengths[3:8]
    few = [lengths[at : at + 3] for at in range(0, len(lengths), 3)]
    assert len(few) == 6  # at batches 1, 2, 4, 8, 16 and 32
    assert all(each[0] == each[1] + each[2] == 16 for each in few)


class Sets(nn.Module):
    """A model whose forward sets parameters outside autograd."""

    def __init__(self, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.net, self.teacher = net(6, 4), net(6, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.shift = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        self.change, self.seen = change, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        loss: Tensor = (self.net(x + self.shift) * self.scale).square().mean()
        return loss


def step_of(model: nn.Module, size: int | None) -> Microbatcher:
    return Microbatcher(model, forward=lambda m, b: m(b), microbatch_size=size)


def move_teacher(model: Any, x: Tensor) -> None:
    for one, other in zip(model.teacher.parameters(), model.net.parameters(), strict=True):
        one.data = one.data * 0.9 + other.data * 0.1


def redraw(model: Any, x: Tensor) -> None:
    model.shift.data.uniform_()


def initialize(model: Any, x: Tensor) -> None:
    if not model.seen:
        model.shift.data = -x.mean(0)
        model.seen.append(len(x))


def test_teacher_updated_in_forward_is_rejected_and_restored() -> None:
    model = Sets(move_teacher)
    before = [(each.data_ptr(), each.clone()) for each in model.parameters()]
    with pytest.raises(RollbackError, match=r"'teacher\.0\.weight'.*a teacher, a key encoder"):
        step_of(model, 3).backward(rows())
    for now, (place, values) in zip(model.parameters(), before, strict=True):
        assert now.data_ptr() == place
        assert torch.equal(now, values)


def test_parameter_redrawn_in_forward_is_restored_after_verify() -> None:
    model = Sets(redraw)
    verify(model, rows(), forward=lambda m, b: m(b))
    assert not model.shift.any()


def test_data_dependent_initialization_warns_and_is_rolled_back() -> None:
    model, batch = Sets(initialize), rows()
    with pytest.warns(BufferWarning, match=r"sets parameters \('shift'\).*before the first step"):
        step_of(model, 3).backward(batch)
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


def test_forward_that_reseeds_generator_warns() -> None:
    sizes: Any = {"microbatch_size": 4, "eval_microbatch_size": 4}
    microbatcher = Microbatcher(net(6, 6), forward=own_seed, **sizes)
    (message,) = warnings_of(microbatcher, *[(rows(), rows())] * 3)
    assert "sets the seed of its random draws" in message
    assert microbatcher.loss_average_is == "wrong"
    with pytest.warns(LossAverageWarning, match="sets the seed"):
        Microbatcher(net(6, 6), forward=own_seed, **sizes).evaluate((rows(), rows()))


class Noisy(nn.Module):
    """Has a private generator that continues from state to state, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(net(6, 6), nn.Dropout(0.5), nn.Linear(6, 6).double())
        self.drawn = torch.Generator().manual_seed(42)

    def forward(self, inputs: Tensor) -> Any:
        return self.inner(inputs + torch.randn(inputs.shape, generator=self.drawn))


def seed_of_each_row(model: Any, batch: Any) -> Tensor:
    noise = [
        torch.randn(6, generator=torch.Generator().manual_seed(int(seed))) for seed in batch[2]
    ]
    return F.mse_loss(model(batch[0] + torch.stack(noise)), batch[1])


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
        seed_of_each_row,
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
    "rrelu": lambda h: F.rrelu(h, training=True),
    "gumbel": F.gumbel_softmax,
    "beta": lambda h: h + torch.distributions.Beta(2.0, 2.0).sample((len(h), 1)),
    "dirichlet": lambda h: h + torch.distributions.Dirichlet(torch.ones(8)).sample((len(h),)),
    "binomial": lambda h: h + torch.distributions.Binomial(5, torch.full_like(h, 0.3)).sample(),
    "poisson": lambda h: h + torch.poisson(h.abs()),
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


def test_warnings_during_check_are_shown_except_torchs_about_single_rows() -> None:
    def forward(model: Any, batch: Any) -> Any:
        if is_extra_pass():
            warnings.warn("a look of few rows", UserWarning, stacklevel=1)
        return F.mse_loss(model(batch[0]), batch[1]) + model[0].weight.sum() * batch[1].std()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Microbatcher(net(6, 6), forward=forward).backward((rows(4), rows(4, 1)))
    said = [str(each.message) for each in caught]
    assert "a look of few rows" in said
    assert not any("degrees of freedom" in each for each in said)


class Queries(nn.Module):
    """Compare rows with a tensor that the caller computed with a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.last = net(6, 6), net(6, 6)
        self.given: Any = None


def _on_module(model: Any, given: Tensor) -> Any:
    model.given = {"weights": [given]}
    return lambda m, b: F.mse_loss(m.last(m.encoder(b[0])) @ m.given["weights"][0].T, b[1])


def _in_batch(model: Any, given: Tensor) -> Any:
    return lambda m, b: F.mse_loss(m.last(b[0]) @ b[2].T, b[1])


@pytest.mark.parametrize("use", [_on_module, _in_batch])
def test_check_does_not_backpropagate_through_graph_of_caller(use: Any) -> None:
    inputs, targets, classes = rows(), rows(), rows(6)
    weights, times = [], []
    for is_ours in (False, True):
        torch.manual_seed(1)
        model, calls = Queries(), list[Tensor]()
        given = model.encoder(classes)  # uses weights that the forward uses, too
        given.register_hook(calls.append)
        batch: Any = (
            (model.encoder(inputs), targets, given) if use is _in_batch else (inputs, targets)
        )
        forward, layout = use(model, given), {"2": "shared"} if use is _in_batch else 0
        if is_ours:
            Microbatcher(model, forward=forward, batch_layout=layout).backward(batch)
        else:
            forward(model, batch).backward()
        weights.append([each.grad for each in model.parameters()])
        times.append(len(calls))
    assert times == [1, 1]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


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
