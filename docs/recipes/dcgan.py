"""Two networks, two optimizers, three losses.

Each loss has its own `Microbatcher`; the order of the loop is unchanged. The generator's step
recomputes its images from the same noise, at the cost of one more forward. D(x) and D(G(z)) come
from `result.outputs`. GroupNorm replaces BatchNorm.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

from automicro import Microbatcher

NOISE = 16


def norm(channels):
    return nn.GroupNorm(4, channels)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 32, 2, bias=False), norm(32), nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), norm(16), nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, 2, 1, bias=False), norm(32), nn.LeakyReLU(0.2),
            nn.Conv2d(32, 1, 2, bias=False), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, image):
        return self.main(image).flatten()


def init(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)


def loader():
    images = torch.tensor(load_digits().images[:1200], dtype=torch.get_default_dtype())
    return DataLoader(images[:, None] / 8 - 1, batch_size=600, shuffle=True)


def plain(epochs=3):
    torch.manual_seed(7)
    netG, netD = Generator().apply(init), Discriminator().apply(init)
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    history = []
    for _ in range(epochs):
        for real in loader():
            noise = torch.randn(len(real), NOISE, 1, 1)
            # The discriminator: tell real images from generated ones.
            netD.zero_grad()
            output = netD(real)
            errD_real = criterion(output, torch.ones_like(output))
            errD_real.backward()
            D_x = output.mean().item()
            fake = netG(noise)
            output = netD(fake.detach())
            errD_fake = criterion(output, torch.zeros_like(output))
            errD_fake.backward()
            D_G_z1 = output.mean().item()
            optimizerD.step()
            # The generator: fool the discriminator.
            netG.zero_grad()
            output = netD(fake)
            errG = criterion(output, torch.ones_like(output))
            errG.backward()
            D_G_z2 = output.mean().item()
            optimizerG.step()
            errD = errD_real + errD_fake
            history += [errD.item(), errG.item(), D_x, D_G_z1, D_G_z2]
    return nn.ModuleList([netG, netD]), history


def microbatched(epochs=3):
    torch.manual_seed(7)
    netG, netD = Generator().apply(init), Discriminator().apply(init)
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))

    def judge_real(netD, real):
        output = netD(real)
        return criterion(output, torch.ones_like(output)), output

    def judge_fake(netD, noise):
        output = netD(netG(noise).detach())
        return criterion(output, torch.zeros_like(output)), output

    def fool(netG, noise):
        output = netD(netG(noise))
        return criterion(output, torch.ones_like(output)), output

    real_pass = Microbatcher(netD, forward=judge_real, optimizer=optimizerD)
    fake_pass = Microbatcher(netD, forward=judge_fake, optimizer=optimizerD, modules=[netG])
    fool_pass = Microbatcher(netG, forward=fool, optimizer=optimizerG, modules=[netD])
    history = []
    for _ in range(epochs):
        for real in loader():
            noise = torch.randn(len(real), NOISE, 1, 1)
            # The discriminator: tell real images from generated ones.
            netD.zero_grad()
            on_real = real_pass.backward(real, return_outputs=True)
            D_x = on_real.outputs.mean().item()
            on_fake = fake_pass.backward(noise, return_outputs=True)
            D_G_z1 = on_fake.outputs.mean().item()
            optimizerD.step()
            # The generator: fool the discriminator.
            netG.zero_grad()
            fooled = fool_pass.backward(noise, return_outputs=True)
            D_G_z2 = fooled.outputs.mean().item()
            optimizerG.step()
            errD, errG = on_real.loss + on_fake.loss, fooled.loss
            history += [errD.item(), errG.item(), D_x, D_G_z1, D_G_z2]
    return nn.ModuleList([netG, netD]), history


if __name__ == "__main__":
    print(*microbatched()[1], sep="\n")
