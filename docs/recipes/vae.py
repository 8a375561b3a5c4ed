"""A variational autoencoder, whose loss is a sum.

Both terms of the loss are sums over rows, so `loss_average="none"` adds microbatches. The model
draws its noise row by row, so on a CPU microbatches draw the same noise as the whole batch.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

from automicro import Microbatcher


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 256), nn.ReLU())
        self.mean, self.logvar = nn.Linear(256, 16), nn.Linear(256, 16)
        self.decode = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 64), nn.Sigmoid())

    def forward(self, x):
        hidden = self.encode(x)
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        return self.decode(z), mean, logvar


def loss_function(reconstruction, x, mean, logvar):
    bce = F.binary_cross_entropy(reconstruction, x, reduction="sum")
    kl = -0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
    return bce + kl


def loader():
    images = torch.tensor(load_digits().data, dtype=torch.get_default_dtype()) / 16
    return DataLoader(images, batch_size=600, shuffle=True)


def plain(epochs=4):
    torch.manual_seed(1)
    train_loader = loader()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = []
    for _ in range(epochs):
        for data in train_loader:
            optimizer.zero_grad()
            reconstruction, mean, logvar = model(data)
            loss = loss_function(reconstruction, data, mean, logvar)
            loss.backward()
            optimizer.step()
            history.append(loss.item() / len(data))
    return model, history


def microbatched(epochs=4):
    torch.manual_seed(1)
    train_loader = loader()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def forward(model, data):
        reconstruction, mean, logvar = model(data)
        return loss_function(reconstruction, data, mean, logvar)

    microbatcher = Microbatcher(model, forward=forward, loss_average="none", optimizer=optimizer)
    history = []
    for _ in range(epochs):
        for data in train_loader:
            optimizer.zero_grad()
            loss = microbatcher.backward(data).loss
            optimizer.step()
            history.append(loss.item() / len(data))
    return model, history


if __name__ == "__main__":
    print(*microbatched()[1], sep="\n")
