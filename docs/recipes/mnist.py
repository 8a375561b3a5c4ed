"""A CNN on digits, evaluated after each epoch.

`F.nll_loss` is recognized as a mean over targets. The evaluation requests the outputs of all rows
and counts correct ones; it has its own microbatch size. Each microbatch draws its own dropout mask.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from automicro import Microbatcher

DROPOUT = 0.25


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.dropout = nn.Dropout(DROPOUT)
        self.fc1 = nn.Linear(16 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.max_pool2d(x, 2).flatten(1)
        x = F.relu(self.fc1(self.dropout(x)))
        return F.log_softmax(self.fc2(self.dropout(x)), dim=1)


def loaders():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.get_default_dtype()).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    train, test = (images[:1000], labels[:1000]), (images[1500:], labels[1500:])
    return (
        DataLoader(TensorDataset(*train), batch_size=500, shuffle=True),
        DataLoader(TensorDataset(*test), batch_size=297),
    )


def plain(epochs=4):
    torch.manual_seed(1)
    train_loader, test_loader = loaders()
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    history = []
    for _ in range(epochs):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        scheduler.step()

        model.eval()
        test_loss = correct = 0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                correct += (output.argmax(dim=1) == target).sum().item()
        history += [test_loss / 297, correct / 297]
    return model, history


def microbatched(epochs=4):
    torch.manual_seed(1)
    train_loader, test_loader = loaders()
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    microbatcher = Microbatcher(model, loss_fn=F.nll_loss, optimizer=optimizer)
    history = []
    for _ in range(epochs):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = microbatcher.backward((data, target)).loss
            optimizer.step()
            history.append(loss.item())
        scheduler.step()

        model.eval()
        test_loss = correct = 0
        with torch.no_grad():
            for data, target in test_loader:
                output = microbatcher.predict(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                correct += (output.argmax(dim=1) == target).sum().item()
        history += [test_loss / 297, correct / 297]
    return model, history


if __name__ == "__main__":
    print(*microbatched()[1], sep="\n")
