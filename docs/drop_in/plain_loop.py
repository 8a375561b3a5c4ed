"""A training loop as everybody writes it. Under a small memory limit it dies in its first batch."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2) -> list[float]:
    torch.manual_seed(0)
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    loader = DataLoader(TensorDataset(images.float() / 16, labels), batch_size=512)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.LayerNorm(512), torch.nn.Linear(512, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_fn = torch.nn.CrossEntropyLoss()
    losses = []
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(*train(), sep="\n")
