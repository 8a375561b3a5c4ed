"""Outputs for all of a data set, however little memory."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from automicro import DataLoaderError, LossError, MemoryBudget, Microbatcher
from tests.trainer.runs import make_data, make_loader, make_model, make_trainer


def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        outputs: Tensor = model(inputs)
    model.train()
    return outputs


def test_predicting_survives_running_out_of_memory() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
    batch = torch.randn(512, 64)
    expected = outputs_of(model, batch)
    with MemoryBudget("256KiB"):
        microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss())
        outputs = microbatcher.predict(batch)
        size = microbatcher.eval_microbatch_size
    assert size is not None
    assert size < 512
    torch.testing.assert_close(outputs, expected)


def test_a_loader_that_shuffles_is_refused() -> None:
    trainer = make_trainer(make_model())
    for options in ({"shuffle": True}, {"sampler": torch.utils.data.SubsetRandomSampler([1, 2])}):
        with pytest.raises(ValueError, match=r"in an unknown order. Pass a loader with shuf"):
            trainer.predict(DataLoader(make_data(), batch_size=4, **options))


def test_an_empty_loader_and_a_forward_without_outputs_are_errors() -> None:
    with pytest.raises(DataLoaderError, match="gave no batch"):
        make_trainer(make_model()).predict([])
    only_loss = make_trainer(
        make_model(),
        loss_fn=None,
        forward=lambda model, batch: model(batch[0]).mean(),
        loss_average="samples",
    )
    with pytest.raises(LossError, match="predictions need outputs; return") as raised:
        only_loss.predict(make_loader())
    assert raised.value.__notes__ == ["automicro: in prediction, batch 1"]
