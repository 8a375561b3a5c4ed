"""A GPT, with accumulation by hand, autocast and a gradient scaler.

`accumulate` replaces the loop over micro-steps: it takes all their batches as one optimization
batch. `backward=` scales the loss. Autocast, clipping and the learning rate stay.
"""

import contextlib
import math
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

from automicro import Microbatcher

DTYPE = "float32"  # or "bfloat16", or "float16" with a GPU
DROPOUT = 0.0
BLOCK_SIZE, BATCH_SIZE = 32, 32
GRADIENT_ACCUMULATION_STEPS = 4
WARMUP_ITERS, LEARNING_RATE, MIN_LR, GRAD_CLIP = 2, 1e-3, 1e-4, 1.0


class GPT(nn.Module):
    def __init__(self, vocabulary=128, width=48, heads=4, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(BLOCK_SIZE, width)
        self.h = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, DROPOUT, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight  # tied

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        for block in self.h:
            x = block(x, mask, is_causal=True)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(data):
    starts = torch.randint(len(data) - BLOCK_SIZE - 1, (BATCH_SIZE,)).tolist()
    x = torch.stack([data[i : i + BLOCK_SIZE] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + BLOCK_SIZE] for i in starts])
    return x, y


def text():
    return torch.tensor([min(byte, 127) for byte in topics["class"].encode()])


def get_lr(iter_num, max_iters):
    if iter_num < WARMUP_ITERS:
        return LEARNING_RATE * (iter_num + 1) / (WARMUP_ITERS + 1)
    share = (iter_num - WARMUP_ITERS) / max(1, max_iters - WARMUP_ITERS)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * share)) * (LEARNING_RATE - MIN_LR)


def autocast():
    if DTYPE == "float32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, DTYPE))


def plain(max_iters=8):
    torch.manual_seed(1337)
    data, model = text(), GPT()
    scaler = torch.amp.GradScaler("cpu", enabled=DTYPE == "float16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    history = []
    X, Y = get_batch(data)
    for iter_num in range(max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num, max_iters)
        total = 0.0
        for _ in range(GRADIENT_ACCUMULATION_STEPS):
            with autocast():
                logits, loss = model(X, Y)
                loss = loss / GRADIENT_ACCUMULATION_STEPS
            X, Y = get_batch(data)
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        history.append(total.item())
    return model, history


def microbatched(max_iters=8):
    torch.manual_seed(1337)
    data, model = text(), GPT()
    scaler = torch.amp.GradScaler("cpu", enabled=DTYPE == "float16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)

    def forward(model, batch):
        X, Y = batch
        with autocast():
            logits, loss = model(X, Y)
        return loss, logits

    microbatcher = Microbatcher(
        model,
        forward=forward,
        backward=lambda loss: scaler.scale(loss).backward(),
        optimizer=optimizer,
    )
    history = []
    for iter_num in range(max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num, max_iters)
        batches = [get_batch(data) for _ in range(GRADIENT_ACCUMULATION_STEPS)]
        loss = microbatcher.accumulate(batches).loss
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        history.append(loss.item())
    return model, history


if __name__ == "__main__":
    print(*microbatched()[1], sep="\n")
