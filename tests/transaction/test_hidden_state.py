"""State that torch does not register: generators, captured modules, odd buffers, merged weights."""

import array
import functools
import random
import time
import types
import warnings
from collections import Counter, UserDict, deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from automicro import (
    BatchNormWarning,
    BufferWarning,
    GradientWarning,
    Halving,
    MemoryBudget,
    Microbatcher,
    Trainer,
    find_batchnorm,
    is_extra_pass,
)
from automicro.modules import ModuleIndex, evaluation_mode
from automicro.reach import Reach
from tests.outside import Outside

GLOBAL_NOISE: Any = None


class Fading(nn.Module):
    """Counts its calls in a plain attribute, and goes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = x + self.linear(x) / self.calls
        return output


@pytest.mark.parametrize(("size", "rows"), [(8, 8), (None, 8), ("auto", 1)])
def test_what_a_whole_batch_counts_is_as_before_an_attempt_at_a_level_below(
    size: Any, rows: int
) -> None:
    def run(*, fails: bool) -> tuple[int, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Fading() for _ in range(3)), nn.Linear(4, 3)).double()
        left = Outside(failures=fails)

        def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            if left.failures and not is_extra_pass():
                left.failures -= 1
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

        microbatcher = Microbatcher(
            model, forward=forward, microbatch_size=size, when_too_large="recompute"
        )
        found = microbatcher.backward((torch.randn(rows, 4).double(), torch.arange(rows) % 3))
        assert found.attempts == 1 + fails
        return cast(Fading, model[0]).calls, found.loss

    assert run(fails=True) == run(fails=False)


def ragged(longest: int) -> Tensor:
    """Rows of which the first four have two values, and zeros behind them."""
    rows = torch.randn(8, longest).double()
    rows[:4, 2:] = 0
    return rows


class Stretching(nn.Module):
    """Scales its buffer by the longest row so far, as rotary embeddings of Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.longest = nn.Linear(1, 3), 2
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.register_buffer("scale", torch.full((1,), 1.0 / self.longest), persistent=False)
        output: Tensor = self.linear(x[:, :, None] * self.get_buffer("scale")).mean(1)
        return output


class Building(Stretching):
    """Makes its buffer in the first forward, behind a flag."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "is_built"):
            self.is_built = True
            self.register_buffer("scale", torch.full((1,), 0.5))
        output: Tensor = self.linear(x[:, :, None] * self.get_buffer("scale")).mean(1)
        return output


class Masking(Stretching):
    """Keeps the mask of its last length in a plain attribute, beside a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.size = torch.ones(1).double(), 1

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, : int((x != 0).sum(1).max())]
        if x.shape[1] != self.size:
            self.size = x.shape[1]
            self.mask = torch.full((self.size,), 1.0 / self.size).double()
        output: Tensor = self.linear((x * self.mask)[:, :, None] * self.get_buffer("scale")).mean(1)
        return output


class Outer(nn.Module):
    """Stretches the buffer of what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = Stretching()
        self.inner.longest, self.longest = 99, 2

    def forward(self, x: Tensor) -> Any:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.inner.scale = self.inner.scale / self.longest
        return self.inner(x)


class Hooking(Stretching):
    """Adds a hook and a module in its first forward, as transformers does where states are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.has_hooks = nn.Sequential(nn.Identity()), False

    def forward(self, x: Tensor) -> Any:
        if not self.has_hooks:
            self.has_hooks = True
            self.linear.register_forward_hook(lambda module, args, output: output * 2)
            self.layers.append(nn.Tanh())
        return self.layers(super().forward(x))


@pytest.mark.parametrize("kind", [Stretching, Building, Masking, Outer, Hooking])
@pytest.mark.parametrize("lengths", [(5,), (2, 5, 3)])
@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.filterwarnings("ignore::automicro.BufferWarning")
@pytest.mark.filterwarnings("ignore::automicro.LossAverageWarning")
def test_what_says_what_a_buffer_is_goes_back_with_it(
    kind: type[nn.Module], lengths: tuple[int, ...], probe: bool
) -> None:
    def run(*, fails: bool) -> list[Any]:
        torch.manual_seed(0)
        model = kind().double()

        def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            if fails and not is_extra_pass() and batch[0].shape == (8, 5):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

        size = "auto" if fails else 4
        microbatcher = Microbatcher(model, forward=forward, microbatch_size=size, probe=probe)
        results = [
            microbatcher.backward((ragged(length), torch.arange(8) % 3)) for length in lengths
        ]
        assert sum(each.ooms for each in results) == fails
        return [each.grad for each in model.parameters()]

    for failed, clean in zip(run(fails=True), run(fails=False), strict=True):
        torch.testing.assert_close(failed, clean, rtol=1e-12, atol=1e-15)


GLOBAL_TEACHER: Any = None


class Loop:
    """A trainer of one's own, whose method is the forward, and which counts what it does."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 3).double()
        self.step, self.losses, self.fails = 0, list[float](), True

    def training_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.step += 1
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        self.losses.append(loss.item())
        if self.fails and len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss


def test_what_the_owner_of_a_method_counts_is_as_before_a_failed_attempt() -> None:
    loop = Loop()
    microbatcher = Microbatcher(loop.model, forward=loop.training_step)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(1, 4):
            batch = torch.randn(8, 4).double(), torch.randint(3, (8,))
            result = microbatcher.backward(batch)
            assert result.num_microbatches == 2
            assert (loop.step, len(loop.losses)) == (2 * number, 2 * number)
    (message,) = [str(each.message) for each in told]
    assert "Loop.step, Loop.losses. It now does so 2 times for a batch" in message


class Remembering(nn.Module):
    """Keeps something in attributes, as one of `KEPT` says."""

    def __init__(self, keep: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.net, self.keep = nn.Linear(4, 3).double(), keep
        self.step, self.mean, self.rows, self.longest = 0, torch.zeros(4).double(), 0, 0
        self.records: dict[str, list[float]] = {"loss": []}
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.last, self.mask, self.at = torch.zeros(1), None, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        outputs: Tensor = self.net(x)
        return outputs


def _set(**how: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], object]:
    def keep(model: Any, x: Tensor) -> None:
        for name, new in how.items():
            setattr(model, name, new(model, x))

    return keep


KEPT: dict[str, tuple[str, Callable[[Any, Tensor], object]]] = {
    # What depends on how many calls there are is named …
    "a counter": ("step", _set(step=lambda m, x: m.step + 1)),
    "a moving average": ("mean", _set(mean=lambda m, x: m.mean * 0.9 + x.detach().mean(0) * 0.1)),
    "one in place": ("mean", lambda m, x: m.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)),
    "a record": ("records", lambda m, x: m.records["loss"].append(float(x.sum()))),
    "a queue": ("recent", lambda m, x: m.recent.append(x.detach().mean(0))),
    # … and what does not is not.
    "rows that add up": ("", _set(rows=lambda m, x: m.rows + len(x))),
    "a sum over rows": ("", _set(mean=lambda m, x: m.mean + x.detach().sum(0))),
    "the last input": ("", _set(last=lambda m, x: x.detach())),
    "the largest": ("", _set(longest=lambda m, x: max(m.longest, x.shape[1]))),
    "what the first call makes": (
        "",
        _set(mask=lambda m, x: torch.ones(4) if m.mask is None else m.mask),
    ),
    "the time": ("", _set(at=lambda m, x: time.perf_counter())),
    "a random number": ("", _set(last=lambda m, x: torch.rand(2))),
}


@pytest.mark.parametrize("size", [None, 3, "auto"])
@pytest.mark.parametrize("kind", KEPT)
def test_state_that_depends_on_the_number_of_calls_is_named_where_a_batch_is_split(
    kind: str, size: Any
) -> None:
    name, keep = KEPT[kind]
    model = Remembering(keep)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=size)
        for _ in range(3):
            microbatcher.backward((torch.randn(8, 4).double(), torch.randn(8, 3).double()))
    told = [str(each.message) for each in caught if each.category is BufferWarning]
    if not name or size != 3:
        assert told == []
    else:
        (message,) = told
        assert message.startswith(f"the training forward changes attributes or variables: {name}.")
        assert "3 times for a batch" in message


class HooksItself(nn.Module):
    """Adds hooks to its layers in its first forward, which it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.wide, self.head = nn.Linear(6, 512), nn.Linear(6, 3)
        self.calls = 0
        self.seen: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.calls == 0:
            for layer in self.layers:
                layer.register_forward_hook(self.keep)
        self.calls += 1
        self.seen = []
        for layer in self.layers:
            x = layer(x).tanh()
        second, self.seen = self.seen[1], None
        output: Tensor = self.head(second) + self.wide(x).square().mean(1, keepdim=True)
        return output

    def keep(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        assert self.seen is not None
        self.seen.append(output)


@pytest.mark.parametrize("options", [{"microbatch_size": 7}, {"memory_limit": "200KiB"}])
def test_hooks_that_a_first_forward_adds_are_there_once(options: dict[str, Any]) -> None:
    # A look, or a failed attempt, that takes the count back has to take the hooks away with it.
    model, whole = HooksItself(), HooksItself()
    whole.load_state_dict(model.state_dict())
    batch = torch.randn(40, 6), torch.randint(3, (40,))
    loss_fn = nn.CrossEntropyLoss()
    microbatcher = Microbatcher(model, loss_fn=loss_fn, **options)
    with pytest.warns(BufferWarning, match="calls"):
        result = microbatcher.backward(batch)
    assert result.num_microbatches > 1
    assert bool(result.ooms) == ("memory_limit" in options)
    microbatcher.evaluate(batch)
    assert [len(layer._forward_hooks) for layer in model.layers] == [1, 1, 1]
    loss = loss_fn(whole(batch[0]), batch[1])
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    for ours, plain in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)


class BuildsItself(nn.Module):
    """Adds a module and a hook on a gradient in its first forward, and notes that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.is_built = nn.Sequential(nn.Linear(6, 3)), False

    def forward(self, x: Tensor) -> Any:
        if not self.is_built:
            self.layers.append(nn.Tanh())
            self.layers.get_parameter("0.weight").register_hook(lambda gradient: gradient * 2)
            self.is_built = True
        return self.layers(x)


def test_modules_and_gradient_hooks_that_a_first_forward_adds_are_there_once() -> None:
    model, whole = BuildsItself().double(), BuildsItself().double()
    whole.load_state_dict(model.state_dict())
    batch = torch.randn(12, 6).double(), torch.randint(3, (12,))
    microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), microbatch_size=5)
    with pytest.warns(GradientWarning, match="registers hooks on 'layers.0.weight'"):
        microbatcher.backward(batch)
    nn.CrossEntropyLoss()(whole(batch[0]), batch[1]).backward()
    assert len(model.layers) == 2
    for ours, plain in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.parametrize("layer", [-2, [-2, -1]])
def test_hidden_states_of_transformers_are_captured_once(layer: Any) -> None:
    vision: dict[str, Any] = {"image_size": 8, "patch_size": 4, "intermediate_size": 24}
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, **vision),
        text_config=transformers.LlamaConfig(vocab_size=37, intermediate_size=24, **sizes),
        image_token_index=3,
        vision_feature_layer=layer,
    )
    model = transformers.LlavaForConditionalGeneration(config).double()
    ids = torch.randint(5, 37, (6, 9))
    labels = ids.clone()
    ids[:, :4] = 3  # the four patches of a picture
    pictures = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    batch = {"input_ids": ids, "pixel_values": pictures, "labels": labels}
    result = Microbatcher(model, microbatch_size=2).backward(batch)
    fresh = transformers.LlavaForConditionalGeneration(config).double()
    fresh.load_state_dict(model.state_dict())
    assert float(result.loss) == pytest.approx(float(fresh(**batch).loss.detach()), rel=1e-5)


class Timing(nn.Module):
    """Keeps how long its last call took, by a clock on a machine with other work."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seconds = nn.Linear(4, 3).double(), 0.0

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x)
        now = time.perf_counter_ns()
        self.seconds = (20_000 + now // 100 % 2 * 60_000 + now % 8_000) * 1e-9
        return outputs


def test_how_long_a_call_took_is_never_taken_for_what_goes_on() -> None:
    batch = torch.randn(8, 4).double(), torch.randn(8, 3).double()
    for _ in range(10):
        microbatcher = Microbatcher(Timing(), loss_fn=nn.MSELoss(), microbatch_size=3)
        microbatcher.backward(batch)
        assert microbatcher.unsaved_state(batch) == []


class Box:
    """An object of the caller's, with whatever attributes."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Called(Box):
    def __call__(self) -> None: ...


class Slotted:
    __slots__ = ("many", "n")

    def __init__(self) -> None:
        self.n, self.many = 0, list[int]()


def _next_member(values: set[int]) -> None:
    largest = max(values)
    values.remove(largest)
    values.add(largest + 1)


def _one_more(values: Any, key: Any = 0) -> None:
    values[key] += 1


def _count_up(owner: Any, name: str = "n") -> None:
    setattr(owner, name, getattr(owner, name) + 1)


# What an attribute holds, what each call does to it, and what counts the calls.
COUNTING: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], int]]] = {
    "list": (list, lambda v: v.append(1), len),
    "list of lists": (lambda: [[[]]], lambda v: v[0][0].append(1), lambda v: len(v[0][0])),
    "long list": (lambda: [0] * 300, _one_more, lambda v: v[0]),
    "dict": (lambda: {"a": 0}, lambda v: _one_more(v, "a"), lambda v: v["a"]),
    "deep dict": (
        lambda: {"a": {"b": {"c": {"d": 0}}}},
        lambda v: _one_more(v["a"]["b"]["c"], "d"),
        lambda v: v["a"]["b"]["c"]["d"],
    ),
    "Counter": (Counter, lambda v: _one_more(v, "a"), lambda v: v["a"]),
    "UserDict": (lambda: UserDict(a=0), lambda v: _one_more(v, "a"), lambda v: v["a"]),
    "set that grows": (set, lambda v: v.add(len(v)), len),
    "set of one size": (lambda: {1, 2}, _next_member, lambda v: max(v) - 2),
    "deque": (lambda: deque([0], 1), lambda v: v.append(v[0] + 1), lambda v: v[0]),
    "array": (lambda: np.zeros(40_000), _one_more, lambda v: int(v[0])),
    "NumPy's number": (lambda: Box(n=np.int64(0)), _count_up, lambda v: int(v.n)),
    "bytearray": (lambda: bytearray(4), _one_more, lambda v: v[0]),
    "typed array": (lambda: array.array("i", [0]), _one_more, lambda v: v[0]),
    "tensor": (lambda: torch.zeros(2), lambda v: v.add_(1), lambda v: int(v[0])),
    "object": (lambda: Box(n=0), _count_up, lambda v: v.n),
    "object that is called": (lambda: Called(n=0), _count_up, lambda v: v.n),
    "object in objects": (
        lambda: Box(a=Box(b=[Box(n=0)])),
        lambda v: _count_up(v.a.b[0]),
        lambda v: v.a.b[0].n,
    ),
    "slot": (Slotted, _count_up, lambda v: v.n),
    "list in a slot": (Slotted, lambda v: v.many.append(1), lambda v: len(v.many)),
}


@pytest.mark.parametrize("kind", COUNTING)
def test_what_an_attribute_holds_counts_no_failed_attempt_and_no_look(kind: str) -> None:
    make, count, counted = COUNTING[kind]

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.kept = nn.Linear(4, 3).double(), make()

        def forward(self, x: Tensor) -> Tensor:
            count(self.kept)
            if len(x) > 4 and not is_extra_pass():
                raise torch.OutOfMemoryError("CUDA out of memory.")
            outputs: Tensor = self.net(x)
            return outputs

    model = Counts()
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss())
    batch = torch.randn(8, 4).double(), torch.randn(8, 3).double()
    with pytest.warns(BufferWarning, match="attributes or variables: kept"):
        result = microbatcher.backward(batch)
    assert (result.ooms, result.num_microbatches) == (1, 2)
    assert counted(model.kept) == 2


class Net(nn.Module):
    """Runs out of memory at some of its calls."""

    def __init__(self, *fails_at: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()
        self.outside = Outside(calls=0, fails_at=fails_at)

    def forward(self, x: Tensor) -> Tensor:
        self.outside.calls += not is_extra_pass()
        if self.outside.calls in self.outside.fails_at and not is_extra_pass():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        out: Tensor = self.layer(x)
        return out


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator).double(), torch.randn(
        8, 3, generator=generator
    ).double()


def starting_at(size: int) -> Halving:
    return Halving(initial=size, refine=False, grow=False)


# ---------------------------------------------------------------- generators


class Draws:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, rows: int) -> Tensor:
        draw = self.generator
        if isinstance(draw, torch.Generator):
            return torch.rand(rows, 1, generator=draw).double()
        if isinstance(draw, random.Random):
            return torch.tensor([[draw.random()] for _ in range(rows)]).double()
        return torch.from_numpy(draw.uniform(size=(rows, 1)))

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        loss: Tensor = nn.functional.mse_loss(model(x + self(len(x))), y)
        return loss


def in_a_closure(draws: Draws) -> Any:
    own = draws
    return lambda model, batch: own.loss(model, batch)


def in_a_closure_of_a_closure(draws: Draws) -> Any:
    def inner(model: Any, batch: Any) -> Tensor:
        return draws.loss(model, batch)

    return lambda model, batch: inner(model, batch)


def in_a_default(draws: Draws) -> Any:
    return lambda model, batch, own=draws: own.loss(model, batch)


def in_a_keyword_default(draws: Draws) -> Any:
    def forward(model: Any, batch: Any, *, own: Draws = draws) -> Tensor:
        return own.loss(model, batch)

    return forward


def in_a_partial(draws: Draws) -> Any:
    return functools.partial(
        lambda own, model, batch: own["held"][0].loss(model, batch), {"held": [draws]}
    )


def in_a_global(draws: Draws) -> Any:
    global GLOBAL_NOISE
    GLOBAL_NOISE = draws
    return lambda model, batch: GLOBAL_NOISE.loss(model, batch)


def in_a_module_of_python(draws: Draws) -> Any:
    library: Any = types.ModuleType("library")
    library.noise = draws
    globals()["library"] = library
    return lambda model, batch: library.noise.loss(model, batch)


def bound(draws: Draws) -> Any:
    return draws.loss


GENERATORS: dict[str, Callable[[], Any]] = {
    "NumPy": lambda: np.random.default_rng(3),
    "NumPy's old one": lambda: np.random.RandomState(3),
    "NumPy with MT19937": lambda: np.random.Generator(np.random.MT19937(3)),
    "Python": lambda: random.Random(3),
    "torch": lambda: torch.Generator().manual_seed(3),
}
PLACES = [
    in_a_closure, in_a_closure_of_a_closure, in_a_default, in_a_keyword_default, in_a_partial,
    in_a_global, in_a_module_of_python, bound,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_are_put_back_wherever_a_function_gets_at_them(kind: str, place: Any) -> None:
    def make() -> tuple[Net, Any]:
        return Net(), place(Draws(GENERATORS[kind]()))

    found = []
    for fails in (False, True):
        model, forward = make()
        policy = starting_at(8 if fails else 4)
        mb = Microbatcher(model, forward=forward, microbatch_size=policy, probe=False)
        for step in range(3):
            model.outside.calls, model.outside.fails_at = 0, (1,) if fails and step == 0 else ()
            assert mb.backward(data(step)).microbatch_size == 4
        found.append(model.layer.weight.grad)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


class Noisy(Net):
    """Keeps a generator in a list, in an object in a dict, and in its class; replaces one."""

    shared = random.Random(0)

    def __init__(self, kind: str, *fails_at: int) -> None:
        super().__init__(*fails_at)
        self.held = [GENERATORS[kind]()]
        self.deeper = {"draws": (Draws(GENERATORS[kind]()),)}
        Noisy.shared.seed(5)
        self.late: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = x + Draws(self.held[0])(len(x)) + self.deeper["draws"][0](len(x))
        x = x + Noisy.shared.random()
        if self.late is not None:
            x = x + self.late.random()
        return super().forward(x)


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_of_a_module_are_put_back_also_those_that_come_later(kind: str) -> None:
    found = []
    for fails in (True, False):
        model = Noisy(kind)
        policy = starting_at(8 if fails else 4)
        mb = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=policy, probe=False)
        for step in range(3):
            if step == 1:  # the second batch: as a new epoch does
                model.held[0] = GENERATORS[kind]()
                model.late = np.random.default_rng(9)
            model.outside.calls, model.outside.fails_at = 0, (1,) if fails and step == 0 else ()
            mb.backward(data(step))
        model.outside.calls, model.outside.fails_at = 0, (2,) if fails else ()
        policy.__init__(initial=4, refine=False, grow=False)  # type: ignore[misc]
        mb.backward(data(7)) if fails else Microbatcher(
            model, loss_fn=nn.MSELoss(), microbatch_size=2, probe=False
        ).backward(data(7))
        found.append(model.layer.weight.grad)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


HOOKS: dict[str, Callable[[nn.Module, Draws], Any]] = {
    "forward": lambda layer, draws: layer.register_forward_hook(
        lambda module, given, output: output + draws(len(output))
    ),
    "before the forward": lambda layer, draws: layer.register_forward_pre_hook(
        lambda module, given: (given[0] + draws(len(given[0])),)
    ),
    "backward": lambda layer, draws: layer.register_full_backward_hook(
        lambda module, given, output: (cast(Any, given)[0] * draws(1),)
    ),
    "before the backward": lambda layer, draws: layer.register_full_backward_pre_hook(
        lambda module, output: (cast(Any, output)[0] * draws(1),)
    ),
}


@pytest.mark.parametrize("kind", ["NumPy", "torch"])
@pytest.mark.parametrize("hook", HOOKS)
def test_generators_that_hooks_of_a_module_draw_from_are_put_back(hook: str, kind: str) -> None:
    def run(*, fails: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        first, last = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
        HOOKS[hook](last, Draws(GENERATORS[kind]()))
        left = Outside(failures=fails)

        def fail_once(gradient: Tensor) -> None:
            if left.failures:
                left.failures -= 1
                raise torch.OutOfMemoryError("CUDA out of memory")

        def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            hidden = first(batch[0])
            hidden.register_hook(fail_once)
            return nn.functional.mse_loss(last(hidden), batch[1])

        model, policy = nn.Sequential(first, last), starting_at(8 if fails else 4)
        mb = Microbatcher(model, forward=forward, microbatch_size=policy, probe=False)
        assert mb.backward(data(0)).microbatch_size == 4
        return [parameter.grad for parameter in model.parameters()]

    torch.testing.assert_close(run(fails=True), run(fails=False), rtol=0, atol=0)


def test_generators_in_a_namespace_are_reached() -> None:
    model: Any = Net()
    model.own = types.SimpleNamespace(noise=random.Random(0))
    assert list(Reach({"": model}).named_generators()) == ["own.noise"]


def test_each_generator_has_a_name_of_its_own() -> None:
    def make(noise: random.Random) -> Callable[[], float]:
        return lambda: noise.random()

    one, two = random.Random(1), random.Random(2)
    found = Reach({"": [make(one), make(two), make(one)]}).named_generators()
    assert found == {"noise": one, "noise (2)": two}


def test_reaching_looks_at_batches_further_and_further_apart() -> None:
    held: list[Any] = []
    reach = Reach({"forward": lambda model, batch: held})
    counts = []
    for step in range(1, 9):
        held.append(random.Random(step))
        reach.step()
        counts.append(len(reach.generators()))
    assert counts == [0, 2, 2, 4, 4, 4, 4, 8]


# ---------------------------------------------------------------- captured modules


def mean_teacher(place: str) -> tuple[Net, Any, nn.Module]:
    global GLOBAL_TEACHER
    model = Net()
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().requires_grad_(False)

    def loss(model: nn.Module, batch: Any, seen: nn.Module) -> Tensor:
        x = batch[0]
        target = seen(torch.cat([x, -x]))[: len(x)]  # one row has no variance
        return nn.functional.mse_loss(model(x), target.detach())

    if place == "closure":
        return model, lambda m, b: loss(m, b, teacher), teacher
    if place == "global":
        GLOBAL_TEACHER = [teacher]
        return model, lambda m, b: loss(m, b, GLOBAL_TEACHER[0]), teacher
    vars(model)["hidden"] = [teacher]  # hidden from torch, as exponential averages often are
    return model, lambda m, b: loss(m, b, m.hidden[0]), teacher


@pytest.mark.filterwarnings("ignore::automicro.LossAverageWarning")
@pytest.mark.parametrize("place", ["closure", "global", "attribute"])
@pytest.mark.parametrize(
    ("probe", "start", "fails_at", "end"),
    [(True, 8, None, 8), (False, 8, None, 8), (False, 8, 1, 4), (False, 4, 2, 2)],
)
def test_a_teacher_that_only_the_forward_knows_moves_once(
    place: str, probe: bool, start: int, fails_at: int | None, end: int
) -> None:
    statistics = []
    for size, fails, looks in ((end, None, False), (start, fails_at, probe)):
        model, forward, teacher = mean_teacher(place)
        mb = Microbatcher(
            model,
            forward=forward,
            microbatch_size=starting_at(size),
            probe=looks,
            batchnorm="ignore",
            loss_average="samples",
        )
        model.outside.fails_at = () if fails is None else (fails,)
        assert mb.backward(data()).microbatch_size == end
        statistics.append([each.clone() for each in teacher.buffers()])
    assert all(map(torch.equal, *statistics))


def test_batchnorm_in_a_captured_module_is_named_where_it_stands() -> None:
    model, forward, _ = mean_teacher("closure")
    mb = Microbatcher(model, forward=forward, microbatch_size=4, probe=False)
    with pytest.warns(BatchNormWarning, match=r"teacher\.1"):
        mb.backward(data())


# ---------------------------------------------------------------- buffers


class Buffered(Net):
    """A buffer of a kind; every forward changes it."""

    kept: Any

    def __init__(self, kind: str, *fails_at: int) -> None:
        super().__init__(*fails_at)
        self.kind = kind
        eye = torch.eye(4).double()
        if kind == "views":
            base = torch.zeros(5, 2).double()
            self.register_buffer("kept", base)
            self.register_buffer("column", base[:, 1])
            self.register_buffer("turned", base.T)
        elif kind == "overlapping":
            self.register_buffer("kept", torch.zeros(6).double().as_strided((4, 3), (1, 1)))
        elif kind == "expanded":
            self.register_buffer("kept", torch.zeros(1).double().expand(4))
        elif kind == "resized":
            self.register_buffer("kept", torch.zeros(0).double())
        elif kind in ("coo", "uncoalesced"):
            sparse = eye.to_sparse()
            if kind == "uncoalesced":
                sparse = torch.sparse_coo_tensor(
                    torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (4, 4)
                ).double()
            self.register_buffer("kept", sparse)
        elif kind in ("csr", "csc"):
            made = eye.to_sparse_csr() if kind == "csr" else eye.to_sparse_csc()
            self.register_buffer("kept", made, persistent=False)
        else:
            self.register_buffer("kept", torch.zeros(3).double())
        self.register_buffer("tied", self.kept)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept
        with torch.no_grad():
            if self.kind == "expanded":
                kept[:1].add_(1)
            elif self.kind == "overlapping":
                kept[0].add_(1)
            elif self.kind == "resized":
                kept.resize_(len(kept) + 1).fill_(len(kept))
            elif self.kind == "coo":
                kept.add_(torch.eye(4).double().to_sparse())
            elif self.kind == "uncoalesced":
                kept.mul_(2)
            elif self.kind in ("csr", "csc"):
                kept.values().add_(1)
            elif self.kind == "replaced":
                self.kept = kept + 1
            elif self.kind == "given other memory":
                kept.data = kept.data + 1
            else:
                kept.add_(1)
        return super().forward(x)


KINDS = [
    "views", "overlapping", "expanded", "resized", "coo", "uncoalesced", "csr", "csc", "replaced",
    "given other memory", "plain",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse :UserWarning")
@pytest.mark.parametrize("call", ["backward", "evaluate"])
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_of_every_kind_come_back(kind: str, call: str) -> None:
    found = []
    for fails in (None, 1):
        model = Buffered(kind)
        policy = starting_at(4 if fails is None else 8)
        outside = Outside(calls=0)

        def loss_fn(outputs: Tensor, targets: Tensor, own: Any = outside, at: Any = fails) -> Any:
            own.calls += 1
            if own.calls == at:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return nn.functional.mse_loss(outputs, targets)

        mb = Microbatcher(
            model,
            loss_fn=loss_fn,
            loss_average="samples",
            microbatch_size=policy,
            eval_microbatch_size=policy,
            probe=False,
            batchnorm="ignore",
        )
        ooms = 0
        for step in range(2):
            ooms += getattr(mb, call)(data(step)).ooms
        assert ooms == (fails or 0)
        found.append([each.to_dense() for each in model.buffers()])
        if kind == "views":
            stats, column, turned = (getattr(model, n) for n in ("kept", "column", "turned"))
            stats.fill_(7)
            assert all(torch.eq(each, 7).all() for each in (column, turned))
    assert all(map(torch.equal, *found))


def test_a_buffer_that_begins_to_change_late_is_named_then() -> None:
    class Late(Net):
        warm = False
        queue: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(3).double())
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.warm:
                self.queue.mul_(0.5).add_(1)
            return super().forward(x)

    model = Late()
    mb = Microbatcher(model, loss_fn=nn.MSELoss(), microbatch_size=4)
    with pytest.warns(BufferWarning, match="attributes or variables: calls"):
        mb.backward(data())
    for step in range(1, 7):
        mb.backward(data(step))
    model.warm = True
    with pytest.warns(BufferWarning, match="changes buffers: queue"):
        mb.backward(data())
    mb.backward(data())  # said once


def test_instance_norm_normalises_rows_and_only_its_statistics_are_buffers() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)).double()
    x = torch.randn(6, 4, 5).double()
    model(x).pow(3).mean().backward()
    parameter = next(model.parameters())
    expected, parameter.grad = parameter.grad, None
    assert find_batchnorm(model) == []
    mb = Microbatcher(model, forward=lambda m, b: m(b).pow(3).mean(), microbatch_size=4)
    with pytest.warns(BufferWarning, match=r"0\.running_mean") as caught:
        mb.backward(x)
    assert [each.category for each in caught] == [BufferWarning]
    torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12)


def test_reached_modules_are_among_the_owners_of_buffers() -> None:
    extra = nn.BatchNorm1d(2)
    index = ModuleIndex([nn.Linear(2, 2)], lambda: {"teacher": extra})
    assert ("teacher", extra) in list(index.owners)


# ---------------------------------------------------------------- modes


class Merging(nn.Module):
    """Adds its small weights to the large one in evaluation mode, as LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(3, 4).double(), requires_grad=False)
        self.small = nn.Parameter(torch.full((3, 4), 0.5).double())
        self.merged = False
        self.modes: list[bool] = []

    def train(self, mode: bool = True) -> "Merging":
        self.modes.append(mode)
        super().train(mode)
        if mode == self.merged:
            self.large.data += -self.small.data if mode else self.small.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.large if self.merged else self.large + self.small).T


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda m: nn.ModuleDict({"it": m})])
@pytest.mark.parametrize("before", ["evaluate", "predict", "probe", "nothing"])
def test_weights_that_are_merged_go_on_learning(before: str, wrap: Any) -> None:
    layer = Merging()
    model = wrap(layer)
    forward = lambda m, b: nn.functional.mse_loss(layer(b[0]), b[1])  # noqa: E731
    x, y = data()
    nn.functional.mse_loss(layer(x), y).backward()
    expected, layer.small.grad = layer.small.grad, None
    options: dict[str, Any] = {"forward": forward}
    mb = Microbatcher(model, probe=before == "probe", microbatch_size=4, **options)
    if before in ("evaluate", "predict") and isinstance(model, nn.Sequential):
        mb.evaluate((x, y))
    mb.backward((x, y))
    assert not layer.merged
    assert layer.training
    torch.testing.assert_close(layer.small.grad, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(layer.large.data, torch.ones(3, 4).double(), rtol=0, atol=0)


def test_nothing_is_called_where_no_mode_changes() -> None:
    layer = Merging()
    layer.eval()
    calls = len(layer.modes)
    with evaluation_mode([layer]):
        assert layer.merged
    assert len(layer.modes) == calls
    with evaluation_mode([nn.Sequential(layer)]):
        pass
    assert layer.merged


def test_an_evaluation_of_many_batches_changes_modes_once() -> None:
    layer = Merging()
    batches = [data(seed) for seed in range(5)]
    trainer = Trainer(
        layer, eval_dataloader=batches, loss_fn=nn.MSELoss(), progress=False, device="cpu"
    )
    layer.modes.clear()
    trainer.eval()
    assert layer.modes == [False, True]
    trainer.predict(batches)
    assert layer.modes == [False, True] * 2


class KeepsFrozen(nn.Sequential):
    """Overrides train(), as many do for BatchNorm."""

    def train(self, mode: bool = True) -> "KeepsFrozen":
        super().train(mode)
        self[0].eval()
        return self


def test_mixed_modes_come_back_exactly() -> None:
    shared = nn.Dropout()
    model: Any = nn.Sequential(
        KeepsFrozen(nn.BatchNorm1d(2), shared),
        nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), shared)),
        Merging(),
    )
    model[1].eval()
    model[1][1].train()
    model[0][0].training = True  # by hand, past the override
    shared.eval()
    before = [each.training for each in model.modules()]
    for _ in range(2):
        with evaluation_mode([model]):
            assert not model[0][0].training
            assert not shared.training
        assert [each.training for each in model.modules()] == before


def test_modes_come_back_where_an_evaluation_fails() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(4, 3).double().eval())
    with pytest.raises(RuntimeError, match="mine"), evaluation_mode([model]):
        raise RuntimeError("mine")
    assert [each.training for each in model.modules()] == [True, True, False]


def test_finding_shapes_moves_nothing_that_is_there() -> None:
    teacher = nn.BatchNorm1d(4)
    noise = np.random.default_rng(1)

    class Counting(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LazyLinear(3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            teacher(torch.cat([x, -x]))
            out: Tensor = self.layer(x + float(noise.random()))
            return out

    model = Counting()
    mb = Microbatcher(model, loss_fn=nn.MSELoss(), probe=False)
    mb.backward((torch.randn(8, 4), torch.randn(8, 3)))
    assert model.seen == 1
    assert teacher.num_batches_tracked == 1
    expected = np.random.default_rng(1)
    expected.random()
    assert noise.random() == expected.random()


# ---------------------------------------------------------------- without gradients


@pytest.mark.parametrize("inner", [True, False])
def test_evaluation_under_inference_mode_recovers_and_counts_once(inner: bool) -> None:
    model: Any = nn.Sequential(Net(2), nn.BatchNorm1d(3).double())
    metric, plain = MulticlassAccuracy(3), MulticlassAccuracy(3)
    mb = Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), eval_microbatch_size=starting_at(4))
    with torch.inference_mode(inner):
        batches = [(data(seed)[0], torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])) for seed in range(3)]
    ooms = 0
    for batch in batches:
        with torch.inference_mode(inner):
            result = mb.evaluate(batch, metric, return_outputs=True)
        ooms += result.ooms
        plain.update(result.outputs, batch[1])
        with torch.inference_mode():
            assert torch.allclose(mb.predict(batch[0]), result.outputs)
    assert ooms == 1
    assert metric.compute() == plain.compute()
    assert all(each.training for each in model.modules())
    with torch.inference_mode():  # with the batch of inference tensors and the metric of before
        model[0].outside.fails_at = (model[0].outside.calls + 2,)
        assert mb.evaluate(batches[0], metric).ooms == 1
    plain.update(mb.predict(batches[0][0]), batches[0][1])
    assert metric.compute() == plain.compute()


@pytest.mark.parametrize("how", ["a budget outside", "a limit of its own"])
def test_predictions_that_came_home_take_no_room_of_the_device(how: str) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 256))
    batches = [torch.randn(64, 16) for _ in range(40)]  # 64 KiB of outputs each
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "progress": False, "device": "cpu"}
    if how == "a budget outside":
        with MemoryBudget("512KiB"):
            outputs = Trainer(model, **options).predict(batches)
    else:
        outputs = Trainer(model, memory_limit="512KiB", **options).predict(batches)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(outputs), model(torch.cat(batches)))
