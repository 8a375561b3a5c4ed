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
from tensordict import LazyStackedTensorDict, TensorDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from automicro import BatchError, Microbatcher, num_rows, register_batch_type
from automicro.batch.layout import split_batch
from tests.batch.structures import Image
from tests.batch.training import Waves
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


# transformers


@pytest.fixture
def tokenizer() -> Any:
    words = {word: index for index, word in enumerate(["[PAD]", "[MASK]", "[UNK]", *"abcdef"])}
    made = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]"
    )


TEXTS = ["a b c a", "b a", "c c c", "a", "b c b c b", "a a", "d", "e f b"]


def language_model() -> nn.Module:
    config = GPT2Config(  # type: ignore[call-arg]
        vocab_size=12, n_embd=8, n_layer=1, n_head=2, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def test_language_model_collator_batch_is_exact_with_popped_labels(
    tokenizer: Any,
) -> None:
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)

    def loss(model: Any, batch: Any) -> Any:
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum") / 10

    batch = collate([tokenizer(t) for t in TEXTS])
    compare(language_model, lambda: batch, loss, loss_average="none")
    assert "labels" in batch


# default_collate of torch on unusual datasets


class MadeDataset(Dataset):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


COLLATED: dict[str, tuple[Callable[[int], Any], Loss]] = {
    "nested pairs": (
        lambda i: ((torch.ones(4) * i, [torch.ones(4), torch.zeros(4)]), str(i)),
        lambda m, b: m(b[0][0].double() + b[0][1][0]),
    ),
    "a mapping of lists": (
        lambda i: {"boxes": [float(i), 1.0, 2.0, 3.0], "x": torch.ones(4)},
        lambda m, b: m(torch.stack(b["boxes"], 1).double()),
    ),
}


@pytest.mark.parametrize("name", COLLATED)
def test_default_collate_batches_are_exact(name: str) -> None:
    make, outputs = COLLATED[name]
    compare(
        lambda: nn.Linear(4, 2).double(),
        lambda: next(iter(DataLoader(MadeDataset(make), batch_size=8))),
        lambda model, batch: outputs(model, batch).pow(2).mean(),
    )


def triplets() -> Any:
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    return next(iter(DataLoader(TensorDataset(*columns), batch_size=8)))


def triplet_loss(model: Any, batch: Any) -> Any:
    return F.triplet_margin_loss(*(model(part) for part in batch))


def test_triplet_list_needs_declaration() -> None:
    with pytest.raises(BatchError, match=r"3 or 8 rows.*DataLoader.*\{'': 'fields'\} for 8 rows"):
        num_rows(triplets())
    compare(lambda: nn.Linear(6, 4).double(), triplets, triplet_loss, batch_layout={"": "fields"})


# tensordict


def rows_of_tensordict() -> Any:
    x = torch.arange(32.0, dtype=torch.float64).view(8, 4) / 9
    return TensorDict({"x": x, "deep": {"y": torch.arange(8) % 3}}, batch_size=[8])


TENSORDICTS: dict[str, Callable[[], Any]] = {
    "plain": rows_of_tensordict,
    "locked": lambda: rows_of_tensordict().lock_(),
    "on a device": lambda: rows_of_tensordict().to("cpu"),
    "stacked lazily": lambda: LazyStackedTensorDict.lazy_stack(
        list(rows_of_tensordict().unbind(0))
    ),
}


@pytest.mark.parametrize("name", TENSORDICTS)
def test_tensordict_is_split_and_unchanged(name: str) -> None:
    def loss(model: Any, batch: Any) -> Any:
        x = batch["x"] if batch.is_locked else batch.pop("x")
        return F.cross_entropy(model(x), batch["deep", "y"])

    batch = TENSORDICTS[name]()
    compare(lambda: nn.Linear(4, 3).double(), lambda: batch, loss)
    assert torch.equal(batch["x"], rows_of_tensordict()["x"])


def test_tensorclass_is_split() -> None:
    @tensordict.tensorclass
    class Rows:
        x: Tensor
        y: Tensor
        name: str

    whole = rows_of_tensordict()
    compare(
        lambda: nn.Linear(4, 3).double(),
        lambda: Rows(x=whole["x"], y=whole["deep", "y"], name="a", batch_size=[8]),  # type: ignore[call-arg]
        lambda model, batch: F.cross_entropy(model(batch.x), batch.y),
    )


def test_tensordict_without_leading_row_dimension_is_rejected() -> None:
    cases: list[Any] = [
        (lambda: TensorDict({"x": torch.zeros(8)}), 0, r"no batch_size.*batch_size=\[rows\]"),
        (rows_of_tensordict, 1, "rows are dimension 0 of its batch_size.*Transpose it"),
    ]
    for batch, layout, message in cases:
        with pytest.raises(BatchError, match=message):
            num_rows(batch(), batch_layout=layout)


# Graphs


def graphs() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        Data(
            x=torch.randn(n, 4, generator=generator, dtype=torch.float64),
            edge_index=torch.tensor([[0], [n - 1]]),
            y=torch.tensor([n % 3]),
        )
        for n in (2, 3, 1, 4, 2, 5, 1, 3)
    ]


def graph_loss(model: Any, batch: Any) -> Any:
    logits = torch.zeros(batch.num_graphs, 3, dtype=torch.float64)
    return F.cross_entropy(logits.index_add(0, batch.batch, model(batch.x)), batch.y)


def test_graph_batch_is_split_once_registered() -> None:
    batch = next(iter(GraphLoader(graphs(), batch_size=8)))
    with pytest.raises(BatchError, match=r"DataBatch.*register_batch_type"):
        num_rows(batch)
    text = next(line for line in _recipes() if "register_batch_type(" in line)
    names = {"copy": copy, "torch_geometric": torch_geometric}
    exec(text, {**names, "register_batch_type": register_batch_type})

    def loss(model: Any, batch: Any) -> Any:
        batch.x = batch.x / 2
        return graph_loss(model, batch)

    x = batch.x.clone()
    compare(lambda: nn.Linear(4, 3).double(), lambda: batch, loss)
    assert torch.equal(batch.x, x)


def _recipes() -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "drop_in.md").read_text(encoding="utf-8")
    blocks = text.split("```py\n")[1:]
    return [block.partition("```")[0] for block in blocks]


# Errors name the part


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


def test_tensor_subclass_attribute_with_rows_is_rejected() -> None:
    class Measured(Tensor):
        lengths: Tensor

    value = torch.zeros(8, 2).as_subclass(Measured)
    value.lengths = torch.arange(8)
    with pytest.raises(BatchError, match=r"Measured in the batch has 8 rows.*'lengths'"):
        Microbatcher(Waves(), forward=lambda m, b: m(b.flatten()), microbatch_size=3).backward(
            value
        )


def test_tensor_subclass_metadata_with_rows_is_rejected() -> None:
    value: Any = torch.zeros(8, 2).as_subclass(Image)  # without custom indexing
    value.meta = {"spacing": [1.0, 2.0], "paths": [str(row) for row in range(8)]}
    with pytest.raises(BatchError, match=r"Image.*'meta\.paths'.*register_batch_type"):
        split_batch([value, torch.zeros(8)], 4)
    del value.meta["paths"]
    assert [vars(part)["meta"] for part, _ in split_batch([value, torch.zeros(8)], 4)] == [
        {"spacing": [1.0, 2.0]}
    ] * 2
