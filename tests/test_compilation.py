"""Models compile at most a few times, give exact results, and refuse invalid options."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from automicro import Halving, MemoryBudget, Microbatcher, is_out_of_memory
from automicro.compilation import check_compile, compile_model, refuse_cuda_graphs

CPU = torch.device("cpu")
FEATURES, CLASSES = 6, 3
ROWS = (64, 61, 50, 64)
ROOM = 8

# torch's compiler reads the gradient of tensors between two graphs, which gives a warning.
between_graphs = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
deprecated = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")


@pytest.fixture(autouse=True)
def reset_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """A model with dropout, so that random numbers matter, and an optional graph break."""

    def __init__(self, *, dropout: float = 0.0, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.dropout, self.breaks = nn.Dropout(dropout), breaks

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.dropout(torch.relu(self.first(inputs)))
        if self.breaks:
            torch._dynamo.graph_break()
            hidden = hidden * 2
        return self.last(hidden)


class LimitedCrossEntropy(nn.CrossEntropyLoss):
    """Cross entropy that runs out of memory with too many rows."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.requires_grad and len(outputs) > ROOM:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(outputs, targets)


def batch_of(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (rows,), generator=generator)


def compiled(model: nn.Module, backend: str = "eager") -> Any:
    """Compile in place, and return a counter of compiled graphs."""
    counter = CompileCounterWithBackend(backend)
    compile_model(model, {"backend": counter}, sizes_change=True)
    return counter


def train(model: nn.Module, **options: Any) -> list[int]:
    """Return the final microbatch size of each batch."""
    microbatcher = Microbatcher(model, **{"loss_fn": LimitedCrossEntropy(), **options})
    return [microbatcher.backward(batch_of(count)).microbatch_size for count in ROWS]


# Number of compilations


def test_all_sizes_compile_twice_and_evaluation_once_more() -> None:
    model = Net()
    counter = compiled(model)
    assert train(model) == [8, 8, 8, 8]  # 64 → 32 → 16 → 8, then 61 as 8 … 7 and 50 as 8 … 7
    assert counter.frame_count == 2
    microbatcher = Microbatcher(
        model, loss_fn=nn.CrossEntropyLoss(), eval_microbatch_size=Halving(initial=9)
    )
    for rows in ROWS:
        microbatcher.evaluate(batch_of(rows))
    assert counter.frame_count == 3


def in_wrapper(net: Net, counter: Any) -> Any:
    return torch.compile(net, backend=counter)


def in_place(net: Net, counter: Any) -> nn.Module:
    net.compile(backend=counter)
    return net


def as_forward(net: Net, counter: Any) -> nn.Module:
    net.forward = torch.compile(net.forward, backend=counter)  # type: ignore[method-assign]
    return net


def in_part(net: Net, counter: Any) -> nn.Module:
    return nn.Sequential(in_place(net, counter), nn.Tanh())


@pytest.mark.parametrize("compile_it", [in_wrapper, as_forward, in_part])
def test_models_compiled_by_caller_compile_twice(
    compile_it: Callable[[Net, Any], nn.Module],
) -> None:
    counter = CompileCounterWithBackend("eager")
    assert train(compile_it(Net(), counter)) == [8, 8, 8, 8]
    assert counter.frame_count == 2


# Exactness


@between_graphs
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.sweep
def test_compiled_gradients_match_whole_batch(breaks: bool) -> None:
    model = Net(breaks=breaks).double()
    expected = copy.deepcopy(model)
    compiled(model, "aot_eager")
    microbatcher = Microbatcher(model, loss_fn=LimitedCrossEntropy())
    for rows in ROWS:
        inputs, targets = batch_of(rows)
        microbatcher.backward((inputs.double(), targets))
        nn.functional.cross_entropy(expected(inputs.double()), targets).backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_only_oom_in_compiled_code_is_retried() -> None:
    def small_device(graph: Any, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            tensors = [each for each in inputs if isinstance(each, Tensor)]
            [rows] = [len(e) for e in tensors if e.shape[1:] == (FEATURES,) and not e.requires_grad]
            if rows > ROOM:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return graph(*inputs)

        return run

    def broken(graph: Any, _: Any) -> Any:
        raise RuntimeError("no compiler")

    model, other = Net(), Net()
    compile_model(model, {"backend": small_device}, sizes_change=True)
    result = Microbatcher(model, loss_fn=nn.CrossEntropyLoss()).backward(batch_of(64))
    assert (result.microbatch_size, result.ooms) == (8, 3)
    compile_model(other, {"backend": broken}, sizes_change=True)
    with pytest.raises(RuntimeError, match="no compiler") as caught:
        Microbatcher(other, loss_fn=nn.CrossEntropyLoss()).backward(batch_of(8))
    assert not is_out_of_memory(caught.value)


# Options


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "max-autotune"},
        {"options": {"triton.cudagraphs": True}},
        {"backend": "cudagraphs"},
    ],
    ids=str,
)
def test_cuda_graphs_need_fixed_sizes(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    said = re.escape(f"compile with {name}={value!r} captures CUDA graphs")
    with pytest.raises(ValueError, match=said):
        check_compile(options, sizes_change=True, device=CPU)
    assert check_compile(options, sizes_change=False, device=CPU) == options


@deprecated
def test_models_with_cuda_graphs_need_fixed_sizes() -> None:
    net = Net()
    net.last.compile(mode="reduce-overhead")
    with pytest.raises(ValueError, match=r"last \(Linear\) was compiled with CUDA graphs"):
        refuse_cuda_graphs([net], sizes_change=True)
    refuse_cuda_graphs([net], sizes_change=False)
    whole = torch.compile(Net(), options={"triton.cudagraphs": True})
    with pytest.raises(ValueError, match=r"the model .* was compiled with CUDA graphs"):
        refuse_cuda_graphs([whole], sizes_change=True)  # type: ignore[list-item]
    refuse_cuda_graphs([Net(), nn.Sequential(in_place(Net(), "eager"))], sizes_change=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moed": "default"}, "refused by torch: .*'moed'. help"),
        ({"mode": "max-autotune-no-cudagraph"}, "Unrecognized mode=max-autotune-no"),
        ({"backend": "inducter"}, "Invalid backend: 'inducter'"),
        ({"options": {"max_autotun": True}}, r"option max_autotun. help\("),
        ({"mode": "default", "options": {}}, "Either mode or options can be"),
    ],
)
def test_options_that_torch_refuses_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_compile(options, sizes_change=False, device=CPU)


def test_compile_with_simulated_device_or_twice_is_refused() -> None:
    simulated = pytest.raises(ValueError, match=r"with a MemoryBudget on the CPU.*Leave out one")
    with MemoryBudget("1MiB"), simulated:
        compile_model(Net(), True, sizes_change=True)
    real = torch.device("cuda")
    assert check_compile(True, sizes_change=True, device=real, memory_limit="1GiB") == {}
    with pytest.raises(ValueError, match=r"model \(Net\) is already compiled\. Leave compile out"):
        compile_model(in_place(Net(), "eager"), True, sizes_change=True)


class _InPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, pool: Tensor) -> Tensor:
        pool.copy_(loss)
        return pool.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Captured(nn.Module):
    """A model whose next loss overwrites the last one, like the outputs of a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.graph = nn.Linear(4, 1), nn.Linear(1, 1)
        self.graph.compile(mode="reduce-overhead")  # never run
        self.pool = torch.zeros(())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        loss = self.layer(x).square().sum() + 0 * self.graph.weight.sum()
        return {"loss": _InPool.apply(loss, self.pool)}


@deprecated
@pytest.mark.parametrize("call", ["backward", "evaluate"])
def test_loss_of_cuda_graph_is_copied_before_next_run(call: str) -> None:
    model, x = Captured(), torch.randn(6, 4)
    sizes: Any = {"microbatch_size": 2, "eval_microbatch_size": 2, "probe": False}
    step = Microbatcher(
        model, forward=lambda model, batch: model(batch), loss_average="none", **sizes
    )
    loss = getattr(step, call)(x).loss
    torch.testing.assert_close(loss, model.layer(x).square().sum())
