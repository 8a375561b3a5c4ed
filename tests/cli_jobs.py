"""A job for the command line, with the code that its config names."""

import sys
from pathlib import Path

import pytest

MODULE = """\
import torch
from torch.utils.data import DataLoader, TensorDataset


def loader(batch_size):
    rows = torch.randn(24, 1024, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows, rows[:, :2].argmax(1)), batch_size=batch_size)


def with_batchnorm():
    return torch.nn.Sequential(torch.nn.Linear(1024, 2), torch.nn.BatchNorm1d(2))


def nan_loss():
    return lambda outputs, targets: outputs.mean() * float("nan")


def bug():
    raise AttributeError("a bug in the user's code")


def loss_of_kind(kind, weight):
    raise ValueError("no such kind")


def interrupting_loss():
    calls = []

    def loss(outputs, targets):
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return outputs.mean()

    return loss


def talking_loss():
    print("a word from the user's code")
    return torch.nn.CrossEntropyLoss()


def model():
    return torch.nn.Linear(1024, 2)
"""

JOB = """\
model: {call: torch.nn.Linear, args: {in_features: 1024, out_features: 2}}
train_dataloader: {call: cli_job.loader, args: {batch_size: 12}}
loss_fn: {call: torch.nn.CrossEntropyLoss}
optimizer: {call: torch.optim.SGD, args: {lr: 0.1}}
device: cpu
"""


def enter_folder_with_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter the folder of job.yaml and its module, like a user."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.delitem(sys.modules, "cli_job", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    Path("cli_job.py").write_text(MODULE, encoding="utf-8")
    Path("job.yaml").write_text(JOB, encoding="utf-8")
