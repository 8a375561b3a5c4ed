"""Policy gradients, with the probabilities of all episodes so far."""

import torch
from torch.distributions import Categorical

from tests.tools.doctor.failures.model import Mlp


def main() -> None:
    policy = Mlp(64, 256)
    optimizer = torch.optim.Adam(policy.parameters())
    log_probabilities: list[torch.Tensor] = []
    rewards: list[float] = []
    for _ in range(50):
        for _ in range(20):
            actions = Categorical(logits=policy(torch.randn(64, 64)))
            chosen = actions.sample()
            log_probabilities.append(actions.log_prob(chosen))  # culprit
            rewards.append(chosen.float().mean().item())
        loss = -torch.stack(log_probabilities[-20:]).mean() * sum(rewards[-20:])
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
