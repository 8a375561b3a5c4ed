"""Sine waves, trained by LBFGS in its closure.

LBFGS evaluates the loss several times per step, through a closure. `Microbatcher.backward`
replaces `loss.backward()` there, and `optimizer=` is left out. Each row is one wave.
"""

import torch
from torch import nn

from automicro import Microbatcher


class Sequence(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.hidden = hidden
        self.lstm1 = nn.LSTMCell(1, hidden)
        self.lstm2 = nn.LSTMCell(hidden, hidden)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, input, future=0):
        state1 = state2 = (input.new_zeros(len(input), self.hidden),) * 2
        outputs = []
        for column in input.split(1, dim=1):
            state1 = self.lstm1(column, state1)
            state2 = self.lstm2(state1[0], state2)
            outputs.append(self.linear(state2[0]))
        for _ in range(future):
            state1 = self.lstm1(outputs[-1], state1)
            state2 = self.lstm2(state1[0], state2)
            outputs.append(self.linear(state2[0]))
        return torch.cat(outputs, dim=1)


def waves(rows=128, length=24):
    shifts = torch.randint(-80, 80, (rows, 1))
    return torch.sin((torch.arange(length) + shifts) / 5.0).double()


def plain(steps=4):
    torch.manual_seed(0)
    data = waves()
    input, target = data[:, :-1], data[:, 1:]
    model = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=3)
    history = []
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = criterion(model(input), target)
            loss.backward()
            history.append(loss.item())
            return loss

        optimizer.step(closure)
    return model, history


def microbatched(steps=4):
    torch.manual_seed(0)
    data = waves()
    input, target = data[:, :-1], data[:, 1:]
    model = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=3)
    microbatcher = Microbatcher(model, loss_fn=criterion)
    history = []
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = microbatcher.backward((input, target)).loss
            history.append(loss.item())
            return loss

        optimizer.step(closure)
    return model, history


if __name__ == "__main__":
    print(*microbatched()[1], sep="\n")
