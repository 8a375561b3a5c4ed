"""Upscaling images: a plain regression.

A mean squared error over images of one size is recognized as a mean over rows.
"""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from automicro import Microbatcher


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.conv3 = nn.Conv2d(16, upscale_factor**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(upscale_factor)
        for conv in (self.conv1, self.conv2, self.conv3):
            nn.init.orthogonal_(conv.weight)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.shuffle(self.conv3(x))


def loader():
    images = torch.tensor(load_digits().images, dtype=torch.get_default_dtype())[:, None] / 16
    return DataLoader(TensorDataset(F.avg_pool2d(images, 2), images), batch_size=600, shuffle=True)


def plain(epochs=4):
    torch.manual_seed(123)
    training_data_loader = loader()
    model = Net(upscale_factor=2)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = []
    for _ in range(epochs):
        for input, target in training_data_loader:
            optimizer.zero_grad()
            loss = criterion(model(input), target)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        history.append(10 * math.log10(1 / history[-1]))  # peak signal to noise, in dB
    return model, history


def microbatched(epochs=4):
    torch.manual_seed(123)
    training_data_loader = loader()
    model = Net(upscale_factor=2)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    microbatcher = Microbatcher(model, loss_fn=criterion, optimizer=optimizer)
    history = []
    for _ in range(epochs):
        for input, target in training_data_loader:
            optimizer.zero_grad()
            loss = microbatcher.backward((input, target)).loss
            optimizer.step()
            history.append(loss.item())
        history.append(10 * math.log10(1 / history[-1]))  # peak signal to noise, in dB
    return model, history


if __name__ == "__main__":
    print(*microbatched()[1], sep="\n")
