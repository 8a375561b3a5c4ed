"""A GPT in a small trainer class, whose model computes its loss.

The model returns logits and loss, so `forward=` picks the loss. Every row has the same number of
targets, so it is a mean over rows, and a check confirms that. If rows differ, pass a function that
counts targets as `loss_average=`.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from automicro import Microbatcher

DROPOUT = 0.1


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(DROPOUT)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.proj(y), DROPOUT, self.training)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, length, width=32, heads=4, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        logits = self.head(self.blocks(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss


class SortDataset(Dataset):
    """Digits followed by the same digits sorted, which are the only targets."""

    def __init__(self, rows=2048, length=6, digits=3):
        generator = torch.Generator().manual_seed(3)
        self.digits, self.length = digits, length
        self.rows = torch.randint(digits, (rows, length), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        both = torch.cat([self.rows[index], self.rows[index].sort().values])
        x, y = both[:-1], both[1:].clone()
        y[: self.length - 1] = -1
        return x, y


class Trainer:
    def __init__(self, model, train_dataset, max_iters, batch_size=256):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95))
        self.train_loader = DataLoader(train_dataset, batch_size, shuffle=True)
        self.max_iters, self.grad_norm_clip = max_iters, 1.0
        self.iter_num, self.loss = 0, None
        self.callbacks = []

    def trigger_callbacks(self):
        for callback in self.callbacks:
            callback(self)


class PlainTrainer(Trainer):
    def run(self):
        model = self.model
        model.train()
        data_iter = iter(self.train_loader)
        while self.iter_num < self.max_iters:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(self.train_loader)
                batch = next(data_iter)
            x, y = batch
            logits, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), self.grad_norm_clip)
            self.optimizer.step()
            self.trigger_callbacks()
            self.iter_num += 1


class MicrobatchedTrainer(Trainer):
    def run(self):
        model = self.model

        def forward(model, batch):
            x, y = batch
            logits, loss = model(x, y)
            return loss, logits

        microbatcher = Microbatcher(model, forward=forward, optimizer=self.optimizer)
        model.train()
        data_iter = iter(self.train_loader)
        while self.iter_num < self.max_iters:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(self.train_loader)
                batch = next(data_iter)
            model.zero_grad(set_to_none=True)
            self.loss = microbatcher.backward(batch).loss
            nn.utils.clip_grad_norm_(model.parameters(), self.grad_norm_clip)
            self.optimizer.step()
            self.trigger_callbacks()
            self.iter_num += 1


def train(trainer_class, max_iters):
    torch.manual_seed(3407)
    dataset = SortDataset()
    model = GPT(dataset.digits, 2 * dataset.length - 1)
    trainer = trainer_class(model, dataset, max_iters)
    history = []
    trainer.callbacks.append(lambda trainer: history.append(trainer.loss.item()))
    trainer.run()
    return model, history


def plain(max_iters=12):
    return train(PlainTrainer, max_iters)


def microbatched(max_iters=12):
    return train(MicrobatchedTrainer, max_iters)


if __name__ == "__main__":
    print(*microbatched()[1], sep="\n")
