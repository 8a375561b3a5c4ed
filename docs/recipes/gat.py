"""Attention over one graph, whose labeled nodes are the rows.

A graph has no rows, so the batch is its labeled nodes. With two layers, a node depends on the nodes
within two hops. The forward computes each microbatch on that part of the graph, which is exact.
Sort nodes by community to keep that part small. Features and adjacency stay on the device.

`HOPS` must be the number of layers: a check of a few nodes cannot detect a number that is too
small. If each of many small graphs is a row, see [batches](../drop_in.md#what-a-batch-may-be).
"""

import torch
import torch.nn.functional as F
from torch import nn

from automicro import Microbatcher

DROPOUT = 0.6
HOPS = 2  # one per layer


class GraphAttention(nn.Module):
    def __init__(self, inputs, outputs, heads):
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(inputs, heads * outputs, bias=False)
        self.source = nn.Parameter(torch.randn(heads, outputs) / outputs**0.5)
        self.target = nn.Parameter(torch.randn(heads, outputs) / outputs**0.5)

    def forward(self, x, adjacency):
        h = self.project(F.dropout(x, DROPOUT, self.training)).unflatten(1, (self.heads, -1))
        to, fro = (h * self.target).sum(-1), (h * self.source).sum(-1)
        scores = F.leaky_relu(to[:, None] + fro[None, :], 0.2)
        scores = scores.masked_fill(~adjacency[:, :, None], -torch.inf)
        attention = F.dropout(scores.softmax(dim=1), DROPOUT, self.training)
        return torch.einsum("tsh,shf->thf", attention, h)


class GAT(nn.Module):
    def __init__(self, features, hidden, classes, heads):
        super().__init__()
        self.first = GraphAttention(features, hidden, heads)
        self.second = GraphAttention(heads * hidden, classes, 1)

    def forward(self, x, adjacency):
        x = F.elu(self.first(x, adjacency).flatten(1))
        return F.log_softmax(self.second(x, adjacency).mean(1), dim=1)


def ring(nodes=320, classes=4):
    """Nodes on a ring, connected to near ones, with features that weakly indicate the class."""
    place = torch.arange(nodes)
    distance = (place[:, None] - place[None, :]).abs()
    distance = torch.minimum(distance, nodes - distance)
    near = (torch.rand(nodes, nodes) < 0.4) & (distance <= 6)
    adjacency = near | near.T | torch.eye(nodes, dtype=torch.bool)
    labels = place * classes // nodes
    features = F.one_hot(labels, classes).to(torch.get_default_dtype()) + torch.randn(
        nodes, classes
    )
    return features, adjacency, labels, place[place % 2 == 0], place[place % 2 == 1]


def plain(epochs=6):
    torch.manual_seed(72)
    features, adjacency, labels, idx_train, idx_val = ring()
    model = GAT(features.shape[1], hidden=8, classes=4, heads=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    history = []
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        output = model(features, adjacency)[idx_train]
        loss = F.nll_loss(output, labels[idx_train])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            output = model(features, adjacency)[idx_val]
            loss_val = F.nll_loss(output, labels[idx_val])
            accuracy = (output.argmax(1) == labels[idx_val]).double().mean()
        history += [loss.item(), loss_val.item(), accuracy.item()]
    return model, history


def microbatched(epochs=6):
    torch.manual_seed(72)
    features, adjacency, labels, idx_train, idx_val = ring()
    model = GAT(features.shape[1], hidden=8, classes=4, heads=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)

    def forward(model, nodes):
        seen = torch.zeros(len(labels), dtype=torch.bool)
        seen[nodes] = True
        for _ in range(HOPS):
            seen = adjacency[seen].any(0)
        part = seen.nonzero()[:, 0]
        place = torch.searchsorted(part, nodes)
        output = model(features[part], adjacency[part][:, part])[place]
        return F.nll_loss(output, labels[nodes]), output

    microbatcher = Microbatcher(model, forward=forward, optimizer=optimizer)
    history = []
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        loss = microbatcher.backward(idx_train).loss
        optimizer.step()
        model.eval()
        with torch.no_grad():
            output = microbatcher.predict(idx_val)
            loss_val = F.nll_loss(output, labels[idx_val])
            accuracy = (output.argmax(1) == labels[idx_val]).double().mean()
        history += [loss.item(), loss_val.item(), accuracy.item()]
    return model, history


if __name__ == "__main__":
    print(*microbatched()[1], sep="\n")
