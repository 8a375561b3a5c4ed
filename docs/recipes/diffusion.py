"""Diffusion with accelerate: noise and time steps belong to the batch.

Noise and time steps are drawn for the whole batch before the model is called, so they are part of
the batch and are cut with it. `accelerator.accumulate`, clipping, the scheduler and the weight
average stay.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from automicro import Microbatcher

TIMESTEPS = 100
GRADIENT_ACCUMULATION_STEPS = 2


class Scheduler:
    """Proportions of image and noise at each time step."""

    def __init__(self):
        betas = torch.linspace(1e-4, 0.2, TIMESTEPS)
        self.kept = torch.cumprod(1 - betas, dim=0)

    def add_noise(self, images, noise, timesteps):
        kept = self.kept[timesteps].view(-1, 1, 1, 1)
        return kept.sqrt() * images + (1 - kept).sqrt() * noise


class ResBlock(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(32, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(TIMESTEPS, 32), nn.SiLU())
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down = ResBlock(width, 2 * width)
        self.up = ResBlock(3 * width, width)
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, timesteps):
        time, top = self.time(timesteps), self.enter(x)
        bottom = self.down(F.avg_pool2d(top, 2), time)
        both = torch.cat([top, F.interpolate(bottom, scale_factor=2)], dim=1)
        return self.leave(self.up(both, time))


def loader():
    images = torch.tensor(load_digits().images[:512], dtype=torch.get_default_dtype())
    return DataLoader(images[:, None] / 8 - 1, batch_size=128, shuffle=True)


def plain(epochs=3):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=GRADIENT_ACCUMULATION_STEPS)
    noise_scheduler, model, train_dataloader = Scheduler(), UNet(), loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = CosineAnnealingLR(optimizer, epochs * len(train_dataloader))
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    history = []
    for _ in range(epochs):
        model.train()
        for clean_images in train_dataloader:
            noise = torch.randn_like(clean_images)
            timesteps = torch.randint(TIMESTEPS, (len(clean_images),))
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            with accelerator.accumulate(model):
                noise_pred = model(noisy_images, timesteps)
                loss = F.mse_loss(noise_pred, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema_model.update_parameters(model)
            history.append(loss.item())
    return ema_model, history


def microbatched(epochs=3):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=GRADIENT_ACCUMULATION_STEPS)
    noise_scheduler, model, train_dataloader = Scheduler(), UNet(), loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = CosineAnnealingLR(optimizer, epochs * len(train_dataloader))
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))

    def forward(model, batch):
        noisy_images, timesteps, noise = batch
        noise_pred = model(noisy_images, timesteps)
        return F.mse_loss(noise_pred, noise)

    microbatcher = Microbatcher(
        model, forward=forward, backward=accelerator.backward, optimizer=optimizer
    )
    history = []
    for _ in range(epochs):
        model.train()
        for clean_images in train_dataloader:
            noise = torch.randn_like(clean_images)
            timesteps = torch.randint(TIMESTEPS, (len(clean_images),))
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            with accelerator.accumulate(model):
                loss = microbatcher.backward((noisy_images, timesteps, noise)).loss
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema_model.update_parameters(model)
            history.append(loss.item())
    return ema_model, history


if __name__ == "__main__":
    print(*microbatched()[1], sep="\n")
