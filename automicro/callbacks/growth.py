"""Sizes of images and sequences that grow during training."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from automicro.batch.device import on_host
from automicro.batch.tensors import replace_tensors, tensor_leaves
from automicro.events.callback import Callback
from automicro.events.run import LoopState, Run
from automicro.options import read_count
from automicro.units import Duration, read_duration

Resize = Callable[[Any, int], Any]
"""Gives a batch at another size: ``resize(batch, size)``."""


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
            the data loader, on the host, and returns a new one without changing the old one.
        steps: number of steps of the growth; None for one step per size. Code compiled for static
            shapes is compiled again at each step.
        multiple_of: sizes between the first and the last are rounded down to a multiple of this.
        logged_as: name under which the size is logged.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> schedule = GrowthSchedule(
        ...     64, 128, over="100ba", steps=4, resize=lambda batch, size: batch[:, :size]
        ... )
        >>> [schedule.size(LoopState(batch=batch)) for batch in (0, 24, 25, 99, 100, 500)]
        [64, 64, 80, 112, 128, 128]
    """

    def __init__(
        self,
        start: int,
        end: int,
        *,
        over: str | Duration,
        resize: Resize,
        steps: int | None = None,
        multiple_of: int = 1,
        logged_as: str = "train/size",
    ) -> None:
        self._start = read_count("start", start)
        self._end = read_count("end", end)
        if end < start:
            raise ValueError(f"it grows from start={start} to end={end}, which is less; swap them")
        self._over = read_duration("over", over)
        self._steps = None if steps is None else read_count("steps", steps)
        self._multiple_of = read_count("multiple_of", multiple_of)
        if not callable(resize):
            raise TypeError(
                f"resize={resize!r} cannot be called; pass a function (batch, size) → batch"
            )
        self._resize = resize
        self._logged_as = logged_as

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


_IMAGE_KEYS = ("pixel_values", "images", "image", "inputs", "x")
_OWN = "pass resize=…, a function (batch, size) → batch of your own"


class ImageSizeSchedule(GrowthSchedule):
    """Trains on smaller images first.

    The shorter side of the images is resized to the size, by bilinear interpolation with
    antialiasing. The longer side keeps the aspect ratio, rounded to ``multiple_of``. Images have
    the shape (rows, channels, height, width) and are the first part of a pair, or the entry of a
    mapping called ``pixel_values``, ``images``, ``image``, ``inputs`` or ``x``.

    Args:
        start: first size, in pixels.
        end: last size, in pixels.
        over: duration of the growth.
        steps: see `GrowthSchedule`.
        multiple_of: see `GrowthSchedule`.
        resize: replaces all of this: ``resize(batch, size)`` returns the resized batch.

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
        super().__init__(
            start,
            end,
            over=over,
            resize=resize or functools.partial(resize_images, multiple_of=multiple_of),
            steps=steps,
            multiple_of=multiple_of,
            logged_as="train/image_size",
        )


def resize_images(batch: Any, size: int, *, multiple_of: int = 1) -> Any:
    """Return a batch with its images at another size; see `ImageSizeSchedule`.

    >>> tuple(resize_images({"images": torch.rand(2, 3, 8, 8)}, 4)["images"].shape)
    (2, 3, 4, 4)
    """
    images = _find_images(batch)
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
    for path, tensor in tensor_leaves(batch):
        if tensor is not images and tensor.dim() >= 3 and tensor.shape[-2:] == images.shape[-2:]:
            raise ValueError(
                f"{path!r} has the height and the width of the images, {height} × {width}, and "
                f"nothing says how to resize it; {_OWN}"
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


def _find_images(batch: Any) -> Tensor:
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    is_named = isinstance(batch, Mapping)
    among: list[Any] = [batch.get(key) for key in _IMAGE_KEYS] if is_named else [first]
    found: list[Tensor] = [each for each in among if _is_image(each)]
    if len(found) != 1:
        raise ValueError(
            f"there are {'several' if found else 'no'} images to resize in {_describe(batch)}: "
            "they would be one tensor of the shape (rows, channels, height, width), the first of a "
            f"pair or called {', '.join(_IMAGE_KEYS)}; {_OWN}"
        )
    return found[0]


def _describe(batch: Any) -> str:
    held = f" with {', '.join(sorted(map(str, batch)))}" if isinstance(batch, Mapping) else ""
    return f"a batch of type {type(batch).__name__}{held}"


def _is_image(value: object) -> bool:
    # A boolean tensor of four dimensions is a mask, which bilinear interpolation would blur.
    return isinstance(value, Tensor) and value.dim() == 4 and value.dtype is not torch.bool


_TOKEN_KEYS = (
    "input_ids",
    "attention_mask",
    "labels",
    "position_ids",
    "token_type_ids",
    "special_tokens_mask",
    "inputs_embeds",
)


class SequenceLengthSchedule(GrowthSchedule):
    """Trains on the beginnings of sequences first.

    Cuts the token dimension to the size. In a mapping, these are the tensors called ``input_ids``,
    ``attention_mask``, ``labels``, ``position_ids``, ``token_type_ids``, ``special_tokens_mask`` or
    ``inputs_embeds``. In a pair, these are the token ids, and the targets if they are per token.
    Shorter sequences are left unchanged.

    Args:
        start: first length, in tokens.
        end: last length, in tokens.
        over: duration of the growth.
        steps: see `GrowthSchedule`.
        multiple_of: see `GrowthSchedule`.
        keys: keys of the mapping that are cut instead of those above.
        resize: replaces all of this: ``resize(batch, size)`` returns the cut batch.

    Raises:
        TypeError, ValueError: an argument is invalid, or a batch has no tokens. Without ``keys``,
            also if another tensor is as long as the tokens.

    Example:
        >>> import torch
        >>> schedule = SequenceLengthSchedule(64, 512, over="1000ba", multiple_of=64)
        >>> batch = {"input_ids": torch.ones(2, 8), "labels": torch.ones(2)}
        >>> {key: tuple(value.shape) for key, value in cut_tokens(batch, 4).items()}
        {'input_ids': (2, 4), 'labels': (2,)}
    """

    def __init__(
        self,
        start: int,
        end: int,
        *,
        over: str | Duration,
        steps: int | None = None,
        multiple_of: int = 1,
        keys: Sequence[str] | None = None,
        resize: Resize | None = None,
    ) -> None:
        if isinstance(keys, str):
            raise TypeError(f"keys={keys!r} is one string; pass a list: keys=[{keys!r}]")
        super().__init__(
            start,
            end,
            over=over,
            resize=resize or functools.partial(cut_tokens, keys=keys),
            steps=steps,
            multiple_of=multiple_of,
            logged_as="train/sequence_length",
        )


def cut_tokens(batch: Any, size: int, *, keys: Sequence[str] | None = None) -> Any:
    """Return a batch with its sequences cut to a length; see `SequenceLengthSchedule`.

    >>> import torch
    >>> tokens, targets = cut_tokens((torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8)), 4)
    >>> tuple(tokens.shape), tuple(targets.shape)
    ((2, 4), (2, 4))
    """
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    inputs, targets = batch if is_pair else (batch, None)
    if isinstance(inputs, Mapping):
        named = _token_parts(inputs, keys)
        tokens = next((each for each in named if each.dim() >= 2), None)
    else:
        named, tokens = [inputs], inputs if _is_tokens(inputs) else None
    if tokens is None:
        raise ValueError(
            f"there are no tokens to cut in {_describe(inputs)}: they would be whole numbers of "
            "the shape (rows, tokens), alone, the first of a pair, or called "
            f"{', '.join(keys or _TOKEN_KEYS)}; name them in keys=[…], or {_OWN}"
        )
    length = tokens.shape[1]
    if length <= size:
        return batch
    if isinstance(inputs, Mapping) and keys is None:
        _refuse_as_long(inputs, length)
    with on_host():
        shorter = {id(each): _cut(each, size, length) for each in (*named, targets)}
        return replace_tensors(batch, shorter)


def _token_parts(inputs: Mapping[str, Any], keys: Sequence[str] | None) -> list[Tensor]:
    if missing := [key for key in keys or () if key not in inputs]:
        raise ValueError(
            f"{', '.join(missing)} of keys= is missing in {_describe(inputs)}; leave it out"
        )
    known = (inputs.get(key) for key in (_TOKEN_KEYS if keys is None else keys))
    return [each for each in known if isinstance(each, Tensor)]


def _refuse_as_long(inputs: Mapping[str, Any], length: int) -> None:
    for key, value in inputs.items():
        # A tensor as long as the tokens probably belongs to them. An error costs less than training
        # on rows that do not match.
        is_as_long = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
        if key not in _TOKEN_KEYS and is_as_long:
            raise ValueError(
                f"{key!r} is as long as the tokens, {length}, and nothing says whether to cut it; "
                "name all that are to be cut in keys=[…]"
            )


def _cut(value: Any, size: int, length: int) -> Any:
    """Cut the second dimension, or the last two, if they have the length of the tokens."""
    # One value per row, such as a class, has no token dimension.
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    if value.dim() == 4 and value.shape[-1] == length:  # a mask of attention scores
        value = value[..., :size]
        return value[..., :size, :] if value.shape[-2] == length else value
    return value[:, :size] if value.shape[1] == length else value


def _is_tokens(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dim() == 2
