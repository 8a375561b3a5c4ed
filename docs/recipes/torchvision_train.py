"""`train_one_epoch` with meters, warm-up, a scaler and averaged weights.

Logged values come from `result.outputs`. Autocast is `precision=`, and `backward=` scales the
loss. GroupNorm replaces BatchNorm.
"""

import collections
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from automicro import Microbatcher

AMP = False
CLIP_GRAD_NORM = 1.0
EMA_STEPS = 2


def norm(channels):
    return nn.GroupNorm(4, channels)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.body(x))


def small_resnet():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), norm(8), nn.ReLU(), Residual(8),
        nn.Conv2d(8, 16, 3, 2, padding=1), Residual(16),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


class MetricLogger:
    """Means over samples, by name."""

    def __init__(self):
        self.totals, self.counts = collections.Counter(), collections.Counter()

    def update(self, n=1, **values):
        for name, value in values.items():
            self.totals[name] += value * n
            self.counts[name] += n

    def mean(self, name):
        return self.totals[name] / self.counts[name]


def accuracy(output, target, topk):
    _, best = output.topk(max(topk), dim=1)
    hits = best == target[:, None]
    return [100 * hits[:, :k].any(1).double().mean().item() for k in topk]


def train_one_epoch(model, criterion, optimizer, data_loader, logger, model_ema=None, scaler=None):
    model.train()
    for i, (image, target) in enumerate(data_loader):
        start_time = time.perf_counter()
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
            optimizer.step()
        if model_ema is not None and i % EMA_STEPS == 0:
            model_ema.update_parameters(model)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        logger.update(len(image), loss=loss.item(), acc1=acc1, acc5=acc5)
        logger.update(images_per_second=len(image) / (time.perf_counter() - start_time))


def train_one_epoch_microbatched(
    model, microbatcher, optimizer, data_loader, logger, model_ema=None, scaler=None
):
    model.train()
    for i, (image, target) in enumerate(data_loader):
        start_time = time.perf_counter()
        optimizer.zero_grad()
        result = microbatcher.backward((image, target), return_outputs=True)
        if scaler is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
            scaler.step(optimizer)
            scaler.update()
        else:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
            optimizer.step()
        if model_ema is not None and i % EMA_STEPS == 0:
            model_ema.update_parameters(model)
        acc1, acc5 = accuracy(result.outputs, target, topk=(1, 5))
        logger.update(len(image), loss=result.loss.item(), acc1=acc1, acc5=acc5)
        logger.update(images_per_second=len(image) / (time.perf_counter() - start_time))


def loader():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.get_default_dtype()).reshape(-1, 1, 8, 8) / 16
    data = TensorDataset(images[:1200], torch.tensor(labels[:1200]))
    return DataLoader(data, batch_size=600, shuffle=True)


def plain(epochs=3):
    torch.manual_seed(0)
    data_loader, model = loader(), small_resnet()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=1)
    lr_scheduler = SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, epochs)], [1])
    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler("cpu") if AMP else None
    history = []
    for _ in range(epochs):
        logger = MetricLogger()
        train_one_epoch(model, criterion, optimizer, data_loader, logger, model_ema, scaler)
        lr_scheduler.step()
        history += [logger.mean(name) for name in ("loss", "acc1", "acc5")]
    return nn.ModuleList([model, model_ema]), history


def microbatched(epochs=3):
    torch.manual_seed(0)
    data_loader, model = loader(), small_resnet()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=1)
    lr_scheduler = SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, epochs)], [1])
    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler("cpu") if AMP else None
    microbatcher = Microbatcher(
        model,
        loss_fn=criterion,
        backward=(lambda loss: scaler.scale(loss).backward()) if AMP else None,
        precision="fp16" if AMP else "fp32",
        optimizer=optimizer,
    )
    history = []
    for _ in range(epochs):
        logger = MetricLogger()
        train_one_epoch_microbatched(
            model, microbatcher, optimizer, data_loader, logger, model_ema, scaler
        )
        lr_scheduler.step()
        history += [logger.mean(name) for name in ("loss", "acc1", "acc5")]
    return nn.ModuleList([model, model_ema]), history


if __name__ == "__main__":
    print(*microbatched()[1], sep="\n")
