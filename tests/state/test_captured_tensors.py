"""Tensors are restored in place, and captures keep no tensor alive."""

import collections
import gc
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from automicro.errors import RollbackError
from automicro.state.capture import capture
from tests.state.undone import Box, undone


def dense(*shape):
    return torch.zeros(*shape).double()


def eye(layout):
    return lambda: dense(4, 4).fill_diagonal_(1).to_sparse(layout=layout)


def uncoalesced():
    return torch.sparse_coo_tensor(torch.ones(2, 2).long(), torch.ones(2), (4, 4))


# By name: a buffer, and a change to it.
# fmt: off
BUFFERS = {
    "empty": (lambda: dense(0), lambda b: b.resize_(len(b) + 1).fill_(len(b))),
    "column": (lambda: dense(5, 3)[:, 1], lambda b: b.add_(1)),
    "expanded": (lambda: dense(1).expand(4), lambda b: b[:1].add_(1)),
    "overlapping": (lambda: dense(6).as_strided((4, 3), (1, 1)), lambda b: b[0].add_(1)),
    "conjugated": (lambda: dense(3).to(torch.cdouble).conj(), lambda b: b.add_(1j)),
    "channels last": (lambda: dense(2, 3, 2, 2).to(memory_format=torch.channels_last), lambda b: b.add_(1)),
    "given other memory": (lambda: dense(3), lambda b: setattr(b, "data", b.data + 1)),
    "given another type": (lambda: dense(3), lambda b: setattr(b, "data", b.data.float() if b.dtype == torch.half else b.data.half())),
    "turned in place": (lambda: dense(4, 3), lambda b: b.add_(1).t_()),
    "coo": (eye(torch.sparse_coo), lambda b: b.mul_(2)),
    "coo that grows": (eye(torch.sparse_coo), lambda b: b.add_(torch.ones(4, 4).to_sparse())),
    "uncoalesced": (uncoalesced, lambda b: b.mul_(2)),
    "csr": (eye(torch.sparse_csr), lambda b: b.values().add_(1)),
}
# fmt: on


@pytest.mark.filterwarnings("ignore:Sparse ")
@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_of_every_layout_are_restored(kind):
    make, change = BUFFERS[kind]
    model: Any = nn.Sequential(nn.Identity(), nn.Identity())
    model[0].register_buffer("kept", kept := make())
    model[1].register_buffer("tied", kept, persistent=False)
    times = 1 if kind == "coo that grows" else 3
    shown = undone({"model": model}, lambda: change(model[0].kept), lambda: kept, times=times)
    assert "model.0.kept" in shown
    assert model[0].kept is kept
    assert model[1].tied is kept


def test_views_still_share_memory_after_restore():
    model: Any = nn.Linear(1, 1)
    base = torch.zeros(5, 2)
    model.register_buffer("base", base)
    model.register_buffer("column", base[:, 1])
    model.turned = base.T
    undone({"model": model}, lambda: model.base.add_(1), lambda: [model.column, model.turned])
    model.base.fill_(7)
    assert model.column.tolist() == [7] * 5
    assert model.turned[0, 0] == 7


def test_buffer_versions_and_addresses_are_kept():
    model: Any = nn.BatchNorm1d(3)
    captured = capture({"model": model})
    for _ in range(3):
        model(torch.randn(4, 3))
        before = [(each.data_ptr(), each._version) for each in model.buffers()]
        captured.put_back()
        assert [(each.data_ptr(), each._version) for each in model.buffers()] == before
        captured = captured.again()
        assert [(each.data_ptr(), each._version) for each in model.buffers()] == before


def test_inference_tensors_are_restored():
    with torch.inference_mode():
        model: Any = nn.BatchNorm1d(3)
        undone({"model": model}, lambda: model(torch.randn(4, 3)), lambda: list(model.buffers()))


@pytest.mark.parametrize("name", ["buffer", "tensor", "given"])
def test_large_tensor_is_restored_or_reported(name):
    model: Any = nn.Linear(1, 1)
    large = torch.zeros(5 * 2**20)
    model.register_buffer("kept", large) if name == "buffer" else setattr(model, "kept", large)
    captured = capture({"model": model} | ({"large": large} if name == "given" else {}))
    model.kept[3] = 1
    model.n = 1
    assert {"model.kept", "large"} & set(captured.changed())
    if name != "tensor":
        captured.put_back()
        assert not large.any()
    else:
        with pytest.raises(RollbackError, match=r"model\.kept"):
            captured.put_back()
    assert not hasattr(model, "n")  # everything else is restored


def test_large_buffer_is_copied_until_known_constant():
    buffer, model = torch.zeros(5 * 2**20), nn.Linear(1, 1)
    model.register_buffer("kept", buffer)
    captured = capture({"model": model})
    for number in (1, 2):
        buffer.data[0] = number  # does not change its version, in an attempt that commits
        captured.let_go()
        captured = captured.again()
        buffer.data[0] = 9
        captured.put_back()
        assert buffer[0] == number
    captured.let_go()  # here, nothing has changed
    buffer[0] = 3
    captured = captured.again()
    buffer[0] = 9
    captured.put_back()
    assert buffer[0] == 3
    for _ in range(2):
        captured.let_go()
        captured = captured.again()
    buffer.data[0] = 9
    with pytest.raises(RollbackError, match=r"model\.kept: .* without a new version"):
        captured.put_back()


def test_tensor_change_is_detected_by_version_or_content():
    plain, sparse = torch.zeros(2), torch.eye(2).to_sparse()
    captured = capture({"held": [plain, sparse]})

    def seen(tensor):
        return [id(tensor) in captured.changed_tensors(by_content=each) for each in (False, True)]

    assert [seen(plain), seen(sparse)] == [[False, False]] * 2
    plain.data.add_(1), sparse.mul_(2)
    assert [seen(plain), seen(sparse)] == [[False, True], [True, True]]
    captured.put_back()
    plain.add_(1).sub_(1)
    assert seen(plain) == [True, False]


def test_changed_frozen_parameter_is_restored_or_reported():
    model = nn.Linear(300, 300).requires_grad_(False)
    before = model.bias.clone()
    captured = capture({"model": model})
    for _ in range(2):
        model.weight.add_(1)
        captured = captured.again()
        captured.put_back()
    model.weight.add_(1), model.bias.add_(1)
    with pytest.raises(RollbackError, match=r"model\.weight"):
        captured.put_back()
    assert torch.equal(model.bias, before)


def test_parameter_flags_and_hooks_are_restored():
    weight = (model := nn.Linear(1, 1)).weight
    undone({"it": model}, lambda: weight.requires_grad_(not weight.requires_grad), lambda: weight)
    weight.requires_grad_(True)
    undone({"it": model}, lambda: weight.register_hook(len), lambda: weight, times=1)


def test_parameter_values_and_gradients_are_not_restored():
    model: Any = nn.Sequential(nn.Linear(2, 2))
    captured = capture({"model": model})
    with torch.no_grad():
        model[0].weight.fill_(2)
    model[0].weight.grad = torch.ones(2, 2)
    assert list(captured.changed()) == []
    captured.put_back()
    assert model[0].weight.tolist() == [[2, 2], [2, 2]]
    assert model[0].weight.grad is not None


GRAPHS = {
    "attribute": lambda h: h,
    "list": lambda h: [h, 1],
    "nested": lambda h: {"all": [(h, 1)]},
    "object": lambda h: Box(h=h),
}


class Keeping(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.net, self.how, self.kept = nn.Linear(4, 4), how, None

    def forward(self, x):
        self.kept = self.how(self.net(x))


def tensor_in(value):
    while not isinstance(value, Tensor):
        value = vars(value) if isinstance(value, Box) else value
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


@pytest.mark.parametrize("box", [None, collections.deque])
def test_capture_keeps_no_autograd_graph_alive(box):
    held = box and box()
    model = Keeping(lambda h: h if box is None else (held.clear(), held.append(h), held)[-1])
    captured = capture({"model": model})
    for _ in range(3):
        model(torch.ones(1, 4))
        captured = captured.again()
    old, content = weakref.ref(tensor_in(model.kept)), tensor_in(model.kept).detach().clone()
    tensor_in(model.kept).grad_fn.metadata["mark"] = mark = Box()
    graph = weakref.ref(mark)
    del mark
    model(torch.ones(1, 4) * 2)
    gc.collect()
    assert (old(), graph()) == (None, None)
    failed = weakref.ref(tensor_in(model.kept))
    captured.put_back()
    gc.collect()
    assert failed() is None
    assert torch.equal(tensor_in(model.kept), content)
    assert type(tensor_in(model.kept)) is Tensor


@pytest.mark.parametrize("how", GRAPHS)
def test_kept_autograd_graph_is_restored(how):
    model = Keeping(GRAPHS[how])
    model(torch.ones(1, 4))
    kept, tensor = model.kept, tensor_in(model.kept)
    captured = capture({"model": model})
    assert list(captured.changed()) == []
    model.kept = None
    captured.put_back()
    assert tensor_in(model.kept) is tensor
    assert type(model.kept) is type(kept)


def test_captured_objects_are_freed_with_capture():
    model: Any = nn.Linear(4, 4)
    model.box, model.mean, model.inner = Box(), torch.ones(3), nn.Linear(1, 1)
    gone = [weakref.ref(each) for each in (model.box, model.mean, model.inner)]
    captured = capture({"model": model})
    del model.box, model.mean, model.inner
    assert all(each() is not None for each in gone)
    gone.append(weakref.ref(captured))
    del captured
    assert [each() for each in gone] == [None] * 4  # without garbage collection: no cycle


def test_nothing_is_held_between_attempts():
    model: Any = nn.Linear(4, 4)
    model.mean, model.seen, model.later, model.array = torch.ones(3), [], 1, np.zeros(99_999)
    captured = capture({"model": model}).again().again()
    model.seen.append(torch.ones(2))
    model.later = torch.ones(2)
    tracemalloc.start()
    captured = captured.again()
    gone = [weakref.ref(each) for each in (model.mean, model.later, *model.seen)]
    held, _ = tracemalloc.get_traced_memory()
    assert captured.let_go()
    assert held - tracemalloc.get_traced_memory()[0] > 700_000
    tracemalloc.stop()
    model.mean = model.later = None
    model.seen.clear()
    assert [each() for each in gone] == [None] * 3
    captured = capture({"model": model})
    model.later = Box()
    assert not captured.let_go()


def test_repeated_captures_leak_no_objects():
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Keeping(GRAPHS["nested"]))
    captured = capture({"model": model})

    def attempt(captured):
        captured = captured.again()
        model(torch.randn(5, 4))
        model.late, model[0].mean = Box(n=[1]), torch.ones(2)
        model.register_forward_hook(lambda *_: None)
        captured.put_back()
        return captured

    for _ in range(3):
        captured = attempt(captured)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(20):
        captured = attempt(captured)
    gc.collect()
    assert len(gc.get_objects()) <= before + 10
