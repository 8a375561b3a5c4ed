"""The example in docs/drop_in changes three lines, and only the plain loop runs out of memory."""

import copy
import difflib
import importlib.util
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from automicro import MemoryBudget, Microbatcher

DOCS = Path(__file__).resolve().parent.parent / "docs" / "drop_in"
LIMIT = "4MiB"


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code(name: str) -> list[str]:
    """Return the lines of code, without docstrings and blank lines."""
    lines = (DOCS / f"{name}.py").read_text(encoding="utf-8").splitlines()[1:]
    return [line for line in lines if line.strip()]


def test_example_changes_three_lines_that_the_page_shows() -> None:
    diff = list(difflib.unified_diff(code("plain_loop"), code("microbatched_loop"), n=0))[2:]
    added = [line for line in diff if line.startswith("+")]
    removed = [line for line in diff if line.startswith("-")]
    assert len(added) == 3, added
    assert len(removed) == 2, removed
    page = (DOCS.parent / "drop_in.md").read_text(encoding="utf-8")
    assert all(line[1:].strip() in page for line in added + removed)
    assert LIMIT.replace("MiB", " MiB") in page


def test_microbatched_loop_gives_same_losses_under_limit() -> None:
    with pytest.raises(torch.OutOfMemoryError), MemoryBudget(LIMIT):
        load("plain_loop").train()
    expected = load("plain_loop").train()
    assert load("microbatched_loop").train() == expected, "the bits, without a limit"
    with MemoryBudget(LIMIT) as budget:
        losses = load("microbatched_loop").train()
    assert budget.num_ooms >= 1
    assert len(losses) == len(expected) == 8
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


# The recipes of the page, each compared with the plain loop.


def small() -> tuple[nn.Module, nn.Module, list[Any]]:
    """Return two copies of a model, and batches."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    batches = [(torch.randn(32, 8), torch.randint(3, (32,))) for _ in range(3)]
    return model, copy.deepcopy(model), batches


def are_equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("around", [False, True])
def test_autocast_gives_weights_of_plain_loop(around: bool) -> None:
    model, plain, batches = small()
    loss_fn = nn.CrossEntropyLoss()
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    precision = "fp32" if around else "bf16"
    microbatcher = Microbatcher(model, loss_fn=loss_fn, optimizer=ours, precision=precision)
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            loss = microbatcher.backward(batch).loss
        with torch.autocast("cpu", torch.bfloat16):
            expected = loss_fn(plain(batch[0]), batch[1])
        expected.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(loss, expected.detach())
    assert are_equal(model, plain)


def test_gan_gives_weights_of_plain_loop() -> None:
    page = (DOCS.parent / "drop_in.md").read_text(encoding="utf-8")
    code = next(each for each in page.split("```python\n") if "generator" in each).split("```")[0]
    nets: dict[str, Any] = {}
    torch.manual_seed(1)
    exec(code.partition("for batch in")[0], nets)
    before = {name: copy.deepcopy(nets[name]) for name in ("generator", "discriminator")}
    batches = [{"real": torch.randn(64, 8), "noise": torch.randn(64, 4)} for _ in range(3)]
    for batch in batches:
        for step, optimizer in (("step_d", "optimizer_d"), ("step_g", "optimizer_g")):
            nets[optimizer].zero_grad()
            nets[step].backward(batch)
            nets[optimizer].step()
    trained = {name: nets[name] for name in before}
    nets |= before  # the functions of the recipe use them as globals
    generator, discriminator = before["generator"], before["discriminator"]
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4)
    for batch in batches:
        optimizer_d.zero_grad()
        nets["judge"](discriminator, batch).backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        nets["fool"](generator, batch).backward()
        optimizer_g.step()
    for name, net in before.items():
        assert are_equal(net, trained[name]), name


def test_loader_batches_stay_on_host() -> None:
    rows = TensorDataset(torch.randn(64, 1024))
    loader = DataLoader(rows, batch_size=16)
    with MemoryBudget(None) as budget:
        found = [budget.allocated_bytes for _ in budget.from_host(loader)]
    assert found == [0] * 4
    with MemoryBudget("40KiB"), pytest.raises(torch.OutOfMemoryError):
        list(loader)
