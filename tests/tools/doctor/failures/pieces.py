"""Caches of many sizes, every other one of which is freed."""

import torch


def main() -> None:
    kept = []
    for size in range(12):
        fleeting = torch.zeros(3 << 20, dtype=torch.uint8)
        kept.append(torch.zeros((2 << 20) + size * 4096, dtype=torch.uint8))
        kept.append(fleeting)
    del fleeting
    kept = kept[::2]
    whole = torch.zeros(30 << 20, dtype=torch.uint8)  # culprit: fragmentation
    del whole
