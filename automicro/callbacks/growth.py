"""Sizes of images and sequences that grow during training."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from automicro.batch.device import on_host
from automicro.batch.tensors import replace_tensors, tensor_leaves
from automicro.durations import Duration, read_duration
from automicro.errors import removed
from automicro.events.callback import Callback
from automicro.events.run import LoopState, Run
from automicro.options import read_count

Resize = Callable[[Any, int], Any]
"""Returns a batch at another size: ``resize(batch, size)``."""


@removed(
    logged_as="Leave it out: each schedule has its own name, such as train/size",
)
class GrowthSchedule(Callback):
    """Trains on smaller samples first, and on larger samples as training progresses.

    The size grows from ``start`` to ``end`` in equal steps, and then stays at ``end``. Larger
    samples need more memory: if the microbatch size no longer fits, a new one is found. Evaluations
    use full-size samples.

    Args:
        start: first size.
        end: last size.
        over: duration of the growth.
        resize: returns a batch at another size: ``resize(batch, size)``. It receives the batch of
            the data loader, on the host, and returns a new one without changing the old one. The
            schedules of images and sequences have their own.
        steps: number of steps of the growth; None for one step per size. Code compiled for static
            shapes is compiled again at each step.
        multiple_of: sizes between the first and the last are rounded down to a multiple of this.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> schedule = GrowthSchedule(
        ...     64, 128, over="100ba", steps=4, resize=lambda batch, size: batch[:, :size]
        ... )
        >>> [schedule.size(LoopState(batch=batch)) for batch in (0, 24, 25, 99, 100, 500)]
        [64, 64, 80, 112, 128, 128]
    """

    _logged_as = "train/size"
    _own_resize: Any = None  # of a class for one kind of data

    def __init__(
        self,
        start: int,
        end: int,
        *,
        over: str | Duration,
        resize: Resize | None = None,
        steps: int | None = None,
        multiple_of: int = 1,
    ) -> None:
        self._start = read_count("start", start)
        self._end = read_count("end", end)
        if end < start:
            raise ValueError(f"start={start} is above end={end}, but the size must grow. Swap them")
        self._over = read_duration("over", over)
        self._steps = None if steps is None else read_count("steps", steps)
        self._multiple_of = read_count("multiple_of", multiple_of)
        self._resize = self._own_resize if resize is None else resize
        if not callable(self._resize):
            raise TypeError(
                f"resize={resize!r} cannot be called. Pass a function (batch, size) → batch"
            )

    def size(self, state: LoopState) -> int:
        """Return the size of the next batch.

        Args:
            state: progress of training.
        """
        done = min(state.done(self._over.unit), self._over.value)
        # Integer arithmetic, so that a resumed run computes the same sizes on any machine.
        if self._steps is None:
            grown = (self._end - self._start) * done // self._over.value
        else:
            step = done * self._steps // self._over.value
            grown = (self._end - self._start) * step // self._steps
        size = self._start + grown
        # The first and last sizes are explicit, so they are used even if they are not a multiple.
        if size in (self._start, self._end):
            return size
        return max(size // self._multiple_of * self._multiple_of, self._start)

    def transform(self, run: Run, batch: Any) -> Any:
        """Return the batch at the current size."""
        size = self.size(run.state)
        run.log({self._logged_as: size})
        return self._resize(batch, size)


_OWN = "Pass resize=…, your own function (batch, size) → batch"


class ImageSizeSchedule(GrowthSchedule):
    """Trains on smaller images first.

    The shorter side of the images is resized to the size, by bilinear interpolation with
    antialiasing. The longer side keeps the aspect ratio, rounded to ``multiple_of``. Images are the
    only tensor of four dimensions: (rows, channels, height, width).

    Args:
        start: first size, in pixels.
        end: last size, in pixels.
        over, resize, steps, multiple_of: see `GrowthSchedule`.

    Raises:
        TypeError, ValueError: an argument is invalid, or a batch has no images. Also if another
            tensor, such as a mask, has the height and width of the images; pass ``resize`` to
            resize it.

    Example:
        >>> schedule = ImageSizeSchedule(16, 32, over="10ep", multiple_of=4)
        >>> images, targets = resize_images((torch.rand(2, 3, 32, 48), torch.zeros(2)), 16)
        >>> tuple(images.shape)
        (2, 3, 16, 24)
    """

    _logged_as = "train/image_size"

    def _own_resize(self, batch: Any, size: int) -> Any:
        return resize_images(batch, size, multiple_of=self._multiple_of)


def resize_images(batch: Any, size: int, *, multiple_of: int = 1) -> Any:
    """Return a batch with its images at another size; see `ImageSizeSchedule`.

    >>> tuple(resize_images({"images": torch.rand(2, 3, 8, 8)}, 4)["images"].shape)
    (2, 3, 4, 4)
    """
    tensors = dict(tensor_leaves(batch))
    # A boolean tensor is a mask, which bilinear interpolation would blur.
    found = [each for each in tensors.values() if each.dim() == 4 and each.dtype != torch.bool]
    if len(found) != 1:
        raise ValueError(
            f"a batch of type {type(batch).__name__} has {len(found)} tensors of the shape (rows, "
            f"channels, height, width), but exactly one is needed. {_OWN}"
        )
    [images] = found
    height, width = images.shape[-2:]
    short, long = min(height, width), max(height, width)
    # The batch itself, without a copy and with the same bits.
    if short == size:
        return batch
    longer = max(round(long * size / short / multiple_of) * multiple_of, multiple_of)
    # A square stays a square, even if its side is not a multiple.
    if long == short:
        longer = size
    target = (size, longer) if height <= width else (longer, size)
    # A mask or a target per pixel that kept its size would silently train on the wrong pixels.
    for path, tensor in tensors.items():
        if tensor is not images and tensor.dim() >= 3 and tensor.shape[-2:] == images.shape[-2:]:
            raise ValueError(
                f"{path!r} has the height and width of the images, {height} × {width}, and might "
                f"need the same resize. {_OWN}"
            )
    # Tensors created on the host do not count as memory of a simulated device.
    with on_host() if images.device.type == "cpu" else torch.no_grad():
        return replace_tensors(batch, {id(images): _interpolated(images.detach(), target)})


def _interpolated(images: Tensor, size: tuple[int, int]) -> Tensor:
    # Bilinear interpolation with antialiasing supports only floating point.
    floating = images if images.is_floating_point() else images.float()
    resized = F.interpolate(floating, size, mode="bilinear", antialias=True, align_corners=False)
    if images.is_floating_point():
        return resized
    # Rounding might exceed the range of the type by one, and the conversion would wrap around.
    limits = torch.iinfo(images.dtype)
    return resized.round_().clamp_(limits.min, limits.max).to(images.dtype)


_TOKEN_KEYS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "labels",
    "position_ids",
    "token_type_ids",
    "special_tokens_mask",
)


@removed(
    keys="Pass resize=…, a function of your own",
)
class SequenceLengthSchedule(GrowthSchedule):
    """Trains on the beginnings of sequences first.

    Cuts the token dimension to the size. In a mapping, these are the tensors called ``input_ids``,
    ``inputs_embeds``, ``attention_mask``, ``labels``, ``position_ids``, ``token_type_ids`` or
    ``special_tokens_mask``. In a pair, these are the token ids, and the targets if they are per
    token. Shorter sequences are left unchanged.

    Args:
        start: first length, in tokens.
        end: last length, in tokens.
        over, resize, steps, multiple_of: see `GrowthSchedule`.

    Raises:
        TypeError, ValueError: an argument is invalid, or a batch has no tokens, or another tensor
            that is as long as the tokens.

    Example:
        >>> import torch
        >>> schedule = SequenceLengthSchedule(64, 512, over="1000ba", multiple_of=64)
        >>> batch = {"input_ids": torch.ones(2, 8).long(), "labels": torch.ones(2)}
        >>> {key: tuple(value.shape) for key, value in cut_tokens(batch, 4).items()}
        {'input_ids': (2, 4), 'labels': (2,)}
    """

    _logged_as = "train/sequence_length"

    def _own_resize(self, batch: Any, size: int) -> Any:
        return cut_tokens(batch, size)


def cut_tokens(batch: Any, size: int) -> Any:
    """Return a batch with its sequences cut to a length; see `SequenceLengthSchedule`.

    >>> import torch
    >>> tokens, targets = cut_tokens((torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8)), 4)
    >>> tuple(tokens.shape), tuple(targets.shape)
    ((2, 4), (2, 4))
    """
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    inputs, targets = batch if is_pair else (batch, None)
    named = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
    tensors = {key: each for key, each in named.items() if isinstance(each, Tensor)}
    lengths = (_length(key, tensors[key]) for key in _TOKEN_KEYS if key in tensors)
    length = next(filter(None, lengths), 0)
    if not length:
        raise ValueError(
            f"a batch of type {type(batch).__name__} has no token ids of the shape (rows, tokens), "
            f"alone, first in a pair, or called {', '.join(_TOKEN_KEYS)}. {_OWN}"
        )
    if length <= size:
        return batch
    for key, value in tensors.items():
        # A tensor as long as the tokens probably belongs to them. An error costs less than training
        # on rows that do not match.
        if key not in _TOKEN_KEYS and value.dim() > 1 and value.shape[1] == length:
            raise ValueError(f"{key!r} has the length of the tokens, {length}. {_OWN}")
    cut = [each for key, each in tensors.items() if key in _TOKEN_KEYS]
    if isinstance(targets, Tensor):
        cut.append(targets)
    with on_host():
        return replace_tensors(batch, {id(each): _cut(each, size, length) for each in cut})


def _length(key: str, value: Tensor) -> int:
    # Inputs in floating point are features, unless they are named as tokens.
    is_tokens = value.dim() > 1 and (key == "inputs_embeds" or not value.is_floating_point())
    return value.shape[1] if is_tokens else 0


def _cut(value: Tensor, size: int, length: int) -> Tensor:
    """Cut the second dimension, or the last two, if they have the length of the tokens."""
    # One value per row, such as a class, has no token dimension.
    if value.dim() < 2:
        return value
    if value.dim() == 4 and value.shape[-1] == length:  # a mask of attention scores
        value = value[..., :size]
        return value[..., :size, :] if value.shape[-2] == length else value
    return value[:, :size] if value.shape[1] == length else value
