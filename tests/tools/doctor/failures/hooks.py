"""Watch what a block computes."""

import torch
from torch.nn.functional import cross_entropy

from tests.tools.doctor.failures.model import Transformer, batches


def main() -> None:
    model = Transformer()
    seen: list[torch.Tensor] = []

    def watch(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        seen.append(output.detach().clone())  # culprit

    for name, module in model.named_modules():
        if name.endswith("mlp.up"):
            module.register_forward_hook(watch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for tokens in batches(300):
        loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
