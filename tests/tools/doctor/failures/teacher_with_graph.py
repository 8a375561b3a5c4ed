"""Distillation, with a graph of the teacher that nobody asked for."""

import torch
from torch.nn.functional import mse_loss

from tests.tools.doctor.failures.model import Mlp


def main() -> None:
    student = Mlp(128, 128)
    teacher = Mlp(128, 2048)
    optimizer = torch.optim.Adam(student.parameters())
    for _ in range(20):
        x = torch.randn(512, 128)
        wanted = teacher(x)  # culprit
        loss = mse_loss(student(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
