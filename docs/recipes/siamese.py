"""Pairs of images: a batch of three parts.

Image, image and label are split together; each pair is one row. GroupNorm replaces BatchNorm.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from automicro import Microbatcher


def norm(channels):
    return nn.GroupNorm(4, channels)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), norm(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), norm(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, first, second):
        both = torch.cat([self.backbone(first), self.backbone(second)], dim=1)
        return self.head(both).squeeze(1)


def loader():
    """Pairs of images, half of them of the same digit."""
    images, labels = load_digits(return_X_y=True)
    images, labels = images[:1200], labels[:1200]
    images = torch.tensor(images, dtype=torch.get_default_dtype()).reshape(-1, 1, 8, 8) / 16
    labels, order = torch.tensor(labels), torch.randperm(len(images))
    same = torch.stack([order[labels[order] == label][0] for label in labels])
    second = torch.where(torch.arange(len(images)) % 2 == 0, same, order)
    matches = (labels == labels[second]).to(images.dtype)
    return DataLoader(TensorDataset(images, images[second], matches), batch_size=600, shuffle=True)


def plain(epochs=3):
    torch.manual_seed(1)
    train_loader = loader()
    model = SiameseNetwork()
    criterion = nn.BCELoss()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    history = []
    for _ in range(epochs):
        for first, second, targets in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(first, second), targets)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    return model, history


def microbatched(epochs=3):
    torch.manual_seed(1)
    train_loader = loader()
    model = SiameseNetwork()
    criterion = nn.BCELoss()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

    def forward(model, batch):
        first, second, targets = batch
        return criterion(model(first, second), targets)

    microbatcher = Microbatcher(model, forward=forward, optimizer=optimizer)
    history = []
    for _ in range(epochs):
        for batch in train_loader:
            optimizer.zero_grad()
            loss = microbatcher.backward(batch).loss
            optimizer.step()
            history.append(loss.item())
    return model, history


if __name__ == "__main__":
    print(*microbatched()[1], sep="\n")
