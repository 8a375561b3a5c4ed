"""Distillation from a large teacher."""

import torch
from torch.nn.functional import kl_div, log_softmax

from tests.tools.doctor.failures.model import Transformer, batches


def main() -> None:
    student = Transformer(width=64, layers=2)
    teacher = Transformer(width=384, layers=6, hidden=1536)  # culprit
    optimizer = torch.optim.AdamW(student.parameters(), foreach=False)
    for tokens in batches(20, rows=16):
        with torch.no_grad():
            wanted = teacher(tokens)
        given = student(tokens)
        logs = log_softmax(given, -1), log_softmax(wanted, -1)
        loss = kl_div(*logs, reduction="batchmean", log_target=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
