"""Batches of other libraries: collators, containers and graphs."""

import collections
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch
import torch.nn.functional as F
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from automicro import BatchError, Microbatcher, num_rows, register_batch_type
from automicro.batch.layout import split_batch
from tests.batch.structures import Image
from tests.cases import difference, gradients
from tests.outside import Outside

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # raised by torch.jit on import
    import torch_geometric
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader

Loss = Callable[[Any, Any], Any]


def compare(
    make: Callable[[], nn.Module], batch: Callable[[], Any], loss: Loss, **options: Any
) -> None:
    """Compare gradients at several sizes, and after an OOM, with plain torch."""
    torch.manual_seed(0)
    whole = make()
    loss(whole, copy.deepcopy(batch())).backward()  # a copy, because plain torch may change it
    trigger = Outside()
    for size in (1, 3, "auto"):
        torch.manual_seed(0)
        model, trigger.failing = make(), size == "auto"

        def forward(model: nn.Module, microbatch: Any, trigger: Any = trigger) -> Any:
            found = loss(model, microbatch)
            if trigger.failing:
                trigger.failing = False
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return found

        microbatcher = Microbatcher(
            model, forward=forward, microbatch_size=size, probe=size == 3, **options
        )
        given = batch()
        for attempt in range(2):  # the second call receives the same batch as the first
            model.zero_grad()
            result = microbatcher.backward(given)
            assert result.num_microbatches > 1 or attempt
            assert difference(gradients(model), gradients(whole)) < 1e-9


def linear(inputs: int, outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, outputs).double()


def test_default_collate_batches_are_exact() -> None:
    rows: Any = [
        {"x": (torch.ones(4) * i, [torch.ones(4)]), "name": str(i), "boxes": [float(i), 1.0]}
        for i in range(8)
    ]

    def loss(model: Any, batch: Any) -> Any:
        boxes = torch.stack(batch.pop("boxes"), 1).double()
        return (model(batch["x"][0].double() + batch["x"][1][0]) * boxes).pow(2).mean()

    compare(linear(4, 2), lambda: next(iter(DataLoader(rows, batch_size=8))), loss)


def triplets() -> Any:
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    return next(iter(DataLoader(TensorDataset(*columns), batch_size=8)))


def test_triplet_list_needs_declaration() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return F.triplet_margin_loss(*(model(part) for part in batch))

    with pytest.raises(BatchError, match=r"3 or 8 rows.*DataLoader.*\{'': 'fields'\} for 8 rows"):
        num_rows(triplets())
    compare(linear(6, 4), triplets, loss, batch_layout={"": "fields"})


def rows_of_tensordict() -> Any:
    x = torch.arange(32.0, dtype=torch.float64).view(8, 4) / 9
    return TensorDict({"x": x, "deep": {"y": torch.arange(8) % 3}}, batch_size=[8])


@tensordict.tensorclass
class Rows:
    x: Tensor
    deep: Any
    name: str


def rows_of_tensorclass() -> Any:
    whole = rows_of_tensordict()
    return Rows(x=whole["x"], deep=whole["deep"], name="a", batch_size=[8])  # type: ignore[call-arg]


TENSORDICTS: dict[str, Callable[[], Any]] = {
    "plain": rows_of_tensordict,
    "locked": lambda: rows_of_tensordict().lock_(),
    "on a device": lambda: rows_of_tensordict().to("cpu"),
    "lazy": lambda: LazyStackedTensorDict.lazy_stack([*rows_of_tensordict().unbind(0)]),
    "tensorclass": rows_of_tensorclass,
}


@pytest.mark.parametrize("name", TENSORDICTS)
def test_tensordict_is_split_and_unchanged(name: str) -> None:
    def loss(model: Any, batch: Any) -> Any:
        can_pop = isinstance(batch, TensorDictBase) and not batch.is_locked
        inputs = batch.pop("x") if can_pop else batch.get("x")
        return F.cross_entropy(model(inputs), batch.get("deep")["y"])

    batch = TENSORDICTS[name]()
    compare(linear(4, 3), lambda: batch, loss)
    assert torch.equal(batch.get("x"), rows_of_tensordict()["x"])


def test_tensordict_without_leading_row_dimension_is_rejected() -> None:
    cases: list[Any] = [
        (lambda: TensorDict({"x": torch.zeros(8)}), 0, r"no batch_size.*batch_size=\[rows\]"),
        (rows_of_tensordict, 1, "rows are dimension 0 of its batch_size.*Transpose it"),
    ]
    for batch, layout, message in cases:
        with pytest.raises(BatchError, match=message):
            num_rows(batch(), batch_layout=layout)


def test_graph_batch_is_split_once_registered() -> None:
    generator = torch.Generator().manual_seed(0)
    graphs = [
        Data(
            x=torch.randn(n, 4, generator=generator, dtype=torch.float64),
            edge_index=torch.tensor([[0], [n - 1]]),
            y=torch.tensor([n % 3]),
        )
        for n in (2, 3, 1, 4, 2, 5, 1, 3)
    ]
    batch = next(iter(GraphLoader(graphs, batch_size=8)))
    with pytest.raises(BatchError, match=r"DataBatch.*register_batch_type"):
        num_rows(batch)
    page = (Path(__file__).parents[2] / "docs" / "drop_in.md").read_text(encoding="utf-8")
    blocks = [each.partition("```")[0] for each in page.split("```py\n")[1:]]
    text = next(block for block in blocks if "register_batch_type(" in block)
    names = {"copy": copy, "torch_geometric": torch_geometric}
    exec(text, {**names, "register_batch_type": register_batch_type})

    def loss(model: Any, batch: Any) -> Any:
        batch.x = batch.x / 2
        logits = torch.zeros(batch.num_graphs, 3, dtype=torch.float64)
        return F.cross_entropy(logits.index_add(0, batch.batch, model(batch.x)), batch.y)

    x = batch.x.clone()
    compare(linear(4, 3), lambda: batch, loss)
    assert torch.equal(batch.x, x)


class Callable8:
    """A callable object that contains rows."""

    def __init__(self) -> None:
        self.x = torch.zeros(8, 2)

    def __call__(self) -> None: ...


def test_unsplittable_part_error_gives_remedy() -> None:
    cases: list[Any] = [
        (Data(x=torch.zeros(8, 2)), "'part' is of type Data.*register_batch_type"),
        (Callable8(), "'part' is of type Callable8, which is callable, but its 'x' has 8 rows"),
        ((n for n in range(8)), "generator.*read only once.*list"),
        (map(str, range(8)), "map.*read only once.*list"),
        (collections.deque(range(8)), "deque.*Make a list"),
        (object(), r"object.*register_batch_type\(object, num_rows=lambda value: …"),
    ]
    for part, message in cases:
        with pytest.raises(BatchError, match=message):
            num_rows({"x": torch.zeros(8), "part": part})
        layout = {"part": "shared"}
        assert num_rows({"x": torch.zeros(8), "part": part}, batch_layout=layout) == 8


def test_tensor_subclass_metadata_with_rows_is_rejected() -> None:
    value: Any = torch.zeros(8, 2).as_subclass(Image)  # without custom indexing
    value.lengths = torch.arange(8)
    with pytest.raises(BatchError, match=r"Image in the batch has 8 rows.*'lengths'"):
        split_batch(value, 3)
    del value.lengths
    value.meta = {"spacing": [1.0, 2.0], "paths": [str(row) for row in range(8)]}
    with pytest.raises(BatchError, match=r"Image.*'meta\.paths'.*register_batch_type"):
        split_batch([value, torch.zeros(8)], 4)
    del value.meta["paths"]
    assert [vars(part)["meta"] for part, _ in split_batch([value, torch.zeros(8)], 4)] == [
        {"spacing": [1.0, 2.0]}
    ] * 2
