"""A run whose rows are sorted by cost goes on where it was, in the same unit alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from automicro import Trainer
from automicro.checkpoints.store import CheckpointConfig
from automicro.features import with_features
from tests.step.texts import Reader, texts

# `Reader` notes what it sees, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:the training forward changes attributes")

LENGTHS = [[9, 3, 12, 5], [2, 7, 4, 11], [6, 6, 1, 14], [3, 13, 8, 2]]


def run(folder: Path, duration: str, **options: Any) -> tuple[Trainer, Reader]:
    torch.manual_seed(0)
    model = Reader(dropout=0.3)
    sizes: dict[str, Any] = {"microbatch_unit": "tokens", "microbatch_size": "auto", **options}
    trainer = Trainer(
        model,
        [texts(each, padded=15) for each in LENGTHS],
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        max_duration=duration,
        loss_average="tokens",
        seed=0,
        checkpoint=CheckpointConfig(folder=folder, interval="1ba", resume="auto"),
        progress=False,
        **with_features(sizes),
    )
    return trainer, model


def test_a_run_that_is_taken_up_again_is_the_undisturbed_one(tmp_path: Path) -> None:
    whole, expected = run(tmp_path / "whole", "7ba")
    whole.fit()
    first, _ = run(tmp_path / "parts", "3ba")
    first.fit()
    second, model = run(tmp_path / "parts", "7ba")
    second.fit()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_another_unit_is_refused(tmp_path: Path) -> None:
    first, _ = run(tmp_path, "3ba")
    first.fit()
    second, _ = run(tmp_path, "7ba", microbatch_unit="rows")
    with pytest.raises(Exception, match="the sizes of this state are in tokens"):
        second.fit()
