"""A recurrent language model that carries its hidden state from batch to batch.

Rows are in dimension 1: `batch_layout=1`, and `Carry(1)` for the hidden state. `backward(batch,
carry=hidden)` gives each microbatch the state of its rows, and `result.carry` is the new state,
joined and detached.
"""

import re
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

from automicro import Microbatcher
from automicro.features import Carry

DROPOUT = 0.2
BPTT = 16
CLIP = 0.25


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp=32, nhid=48, nlayers=2):
        super().__init__()
        self.nlayers, self.nhid = nlayers, nhid
        self.drop = nn.Dropout(DROPOUT)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=DROPOUT)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)), dim=-1), hidden

    def init_hidden(self, batch_size):
        zeros = self.decoder.weight.new_zeros(self.nlayers, batch_size, self.nhid)
        return zeros, zeros.clone()


def repackage_hidden(hidden):
    return tuple(state.detach() for state in hidden)


def batchify(batch_size, ntoken):
    """The most frequent words of a text, as columns of shape (words per column, batch_size)."""
    words = re.findall(r"\w+|\S", topics["for"] + topics["class"] + topics["operator-summary"])
    known = sorted(set(words), key=words.count, reverse=True)[: ntoken - 1]
    number = {word: index + 1 for index, word in enumerate(known)}
    data = torch.tensor([number.get(word, 0) for word in words])
    length = len(data) // batch_size
    return data[: length * batch_size].view(batch_size, length).t().contiguous()


def get_batch(source, i):
    length = min(BPTT, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length]


def plain(epochs=3, batch_size=48, ntoken=200, lr=5.0):
    torch.manual_seed(1111)
    train_data = batchify(batch_size, ntoken)
    model = RNNModel(ntoken)
    criterion = nn.NLLLoss()
    history = []
    for _ in range(epochs):
        hidden = model.init_hidden(batch_size)
        for i in range(0, len(train_data) - 1, BPTT):
            data, targets = get_batch(train_data, i)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output.flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            history.append(loss.item())
    return model, history


def microbatched(epochs=3, batch_size=48, ntoken=200, lr=5.0):
    torch.manual_seed(1111)
    train_data = batchify(batch_size, ntoken)
    model = RNNModel(ntoken)
    criterion = nn.NLLLoss()

    def forward(model, batch, hidden):
        data, targets = batch
        output, hidden = model(data, hidden)
        return {"loss": criterion(output.flatten(0, 1), targets.flatten()), "carry": hidden}

    microbatcher = Microbatcher(model, forward=forward, batch_layout=1, features=[Carry(1)])
    history = []
    for _ in range(epochs):
        hidden = model.init_hidden(batch_size)
        for i in range(0, len(train_data) - 1, BPTT):
            batch = get_batch(train_data, i)
            model.zero_grad()
            result = microbatcher.backward(batch, carry=hidden)
            loss, hidden = result.loss, result.carry
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            history.append(loss.item())
    return model, history


if __name__ == "__main__":
    print(*microbatched()[1], sep="\n")
