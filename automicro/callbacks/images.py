"""Images that grow in training."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from automicro.callbacks.growth import GrowthSchedule, Resize
from automicro.duration import Duration
from automicro.slicing import tensor_leaves
from automicro.transfer import on_host

_KEYS = ("pixel_values", "images", "image", "inputs", "x")
_OWN = "pass resize=…, a function (batch, size) → batch of your own"


class ImageSizeSchedule(GrowthSchedule):
    """Trains on smaller images first.

    The shorter side of the images becomes the size, by bilinear interpolation with antialiasing;
    the other side keeps their shape, rounded to ``multiple_of``. Images are the first part of a
    pair, or in a mapping what is called ``pixel_values``, ``images``, ``image``, ``inputs`` or
    ``x``, and have the shape (rows, channels, height, width).

    Args:
        start: the first size, in pixels.
        end: the last one.
        over: how long it grows.
        steps: see `GrowthSchedule`.
        multiple_of: see `GrowthSchedule`.
        resize: in place of all that: ``resize(batch, size)`` gives the batch.

    Raises:
        TypeError, ValueError: arguments that make no sense, or a batch without images. Also one in
            which something else has the height and the width of the images, such as a mask: how
            that is resized is yours to say.

    Example:
        >>> schedule = ImageSizeSchedule(16, 32, over="10ep", multiple_of=4)
        >>> images, targets = resize_images((torch.rand(2, 3, 32, 48), torch.zeros(2)), 16)
        >>> tuple(images.shape)
        (2, 3, 16, 24)
    """

    def __init__(
        self,
        start: int,
        end: int,
        *,
        over: str | Duration,
        steps: int | None = None,
        multiple_of: int = 1,
        resize: Resize | None = None,
    ) -> None:
        def by_default(batch: Any, size: int) -> Any:
            return resize_images(batch, size, multiple_of=multiple_of)

        super().__init__(
            start,
            end,
            over=over,
            resize=by_default if resize is None else resize,
            steps=steps,
            multiple_of=multiple_of,
            logged_as="train/image_size",
        )


def resize_images(batch: Any, size: int, *, multiple_of: int = 1) -> Any:
    """A batch with its images at another size; see `ImageSizeSchedule`.

    Args:
        batch: images, a pair that begins with them, or a mapping that has them.
        size: of their shorter side.
        multiple_of: what the longer side is rounded to.

    Raises:
        ValueError: there are no images, or something else has their height and width.

    >>> tuple(resize_images({"images": torch.rand(2, 3, 8, 8)}, 4)["images"].shape)
    (2, 3, 4, 4)
    """
    key, images = _find(batch)
    height, width = images.shape[-2:]
    short, long = min(height, width), max(height, width)
    if short == size:
        return batch
    longer = max(round(long * size / short / multiple_of) * multiple_of, multiple_of)
    if long == short:
        longer = size
    target = (size, longer) if height <= width else (longer, size)
    for path, tensor in tensor_leaves(batch):
        if tensor is not images and tensor.dim() >= 3 and tensor.shape[-2:] == images.shape[-2:]:
            raise ValueError(
                f"{path!r} has the height and the width of the images, {height} × {width}, and "
                f"nothing says how to resize it; {_OWN}"
            )
    with on_host() if images.device.type == "cpu" else torch.no_grad():
        resized = _interpolated(images.detach(), target)
    if key is None:
        return resized
    if isinstance(batch, Mapping):
        return {**batch, key: resized}
    parts = [resized, *batch[1:]]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _interpolated(images: Tensor, size: tuple[int, int]) -> Tensor:
    floating = images if images.is_floating_point() else images.float()
    resized = F.interpolate(floating, size, mode="bilinear", antialias=True, align_corners=False)
    if images.is_floating_point():
        return resized
    limits = torch.iinfo(images.dtype)
    return resized.round_().clamp_(limits.min, limits.max).to(images.dtype)


def _find(batch: Any) -> tuple[Any, Tensor]:
    """Where the images are: a key, 0 in a sequence, None where the batch is the images."""
    if isinstance(batch, Mapping):
        found = [key for key in _KEYS if _is_image(batch.get(key))]
        if len(found) == 1:
            return found[0], batch[found[0]]
        names = ", ".join(sorted(map(str, batch)))
        which = f"several of {', '.join(found)}" if found else f"none of {', '.join(_KEYS)}"
        raise ValueError(
            f"to resize images, the batch has {which} as a 4-D tensor (it has {names}); {_OWN}"
        )
    if isinstance(batch, tuple | list) and batch and _is_image(batch[0]):
        return 0, batch[0]
    if _is_image(batch):
        return None, batch
    raise ValueError(
        f"there are no images to resize in a batch of type {type(batch).__name__}: they would be "
        f"a tensor of the shape (rows, channels, height, width), or the first of a pair; {_OWN}"
    )


def _is_image(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.dtype is not torch.bool
