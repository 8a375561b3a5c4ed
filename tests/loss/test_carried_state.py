"""State that a closure carries from batch to batch: extra passes of ours leave it as it was."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from automicro import MemoryBudget, Microbatcher

WORDS, ROWS = 10, 24
Hidden = Any  # None before the first batch
Forward = Callable[[nn.Module, Any], Tensor]


class Recurrent(nn.Module):
    """An LSTM over words, whose hidden state is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, WORDS)

    def forward(self, words: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        outputs, hidden = self.lstm(self.embed(words), hidden)
        return self.head(outputs), tuple(each.detach() for each in hidden)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def in_a_variable() -> Forward:
    carried: Hidden = None

    def forward(model: nn.Module, batch: Any) -> Tensor:
        nonlocal carried
        outputs, carried = model(batch[0], carried)
        return loss_of(outputs, batch[1])

    return forward


def in_a_tensor() -> Forward:
    """Written into."""
    carried = torch.zeros(2, 1, ROWS, 6)

    def forward(model: nn.Module, batch: Any) -> Tensor:
        outputs, hidden = model(batch[0], tuple(carried[:, :, : len(batch[0])].clone()))
        carried[:, :, : len(batch[0])] = torch.stack(hidden)
        return loss_of(outputs, batch[1])

    return forward


PLACES = [in_a_variable, in_a_tensor]


# What is carried in a tensor of its own is seen to change the gradient of the same rows.
@pytest.mark.filterwarnings("ignore:splitting changes this batch")
@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
def test_with_memory_for_whole_batches_training_is_that_of_the_plain_loop(
    make: Callable[[], Forward],
) -> None:
    model = Recurrent()
    plain = copy.deepcopy(model)
    batches = [(torch.randint(WORDS, (ROWS, 5)), torch.randint(WORDS, (ROWS, 5))) for _ in range(5)]
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, plain))
    microbatcher = Microbatcher(model, forward=make(), optimizer=ours, loss_average="samples")
    with MemoryBudget(None):
        losses = []
        for batch in batches:
            result = microbatcher.backward(batch)
            assert result.num_microbatches == 1
            losses.append(result.loss)
            ours.step()
            ours.zero_grad()
    forward = make()
    for batch, found in zip(batches, losses, strict=True):
        loss = forward(plain, batch)
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        assert torch.equal(found, loss.detach())
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
