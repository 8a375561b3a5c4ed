"""When one run asks the cache, and when it writes."""

from collections.abc import Mapping

from automicro.size_cache.cache import SizeCache
from automicro.size_cache.key import RunKey
from automicro.size_cache.record import RememberedSize


class SizeMemory:
    """What a run remembers: asked once at its first batch, written when its size changed.

    Args:
        cache: where sizes lie.
        key: of the run, from its first batch.
        writes: whether this process writes: of several that train together, only the first.

    >>> import tempfile
    >>> from automicro.size_cache import RunKey
    >>> key = RunKey(
    ...     model="Linear", structure="1f2e", parameters=18, device="CPU", memory_bytes=None,
    ...     precision="fp32", phase="train", compiled=False, optimizer="AdamW", rows=64,
    ...     shapes={"0": "float32[8]"}, world_size=1, automicro="0.1.0", torch="2.13.0",
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = SizeMemory(SizeCache(folder), key)
    ...     first.recalled
    ...     first.settle(RememberedSize(microbatch_size=16), rows=64)
    ...     SizeMemory(SizeCache(folder), key).recalled.microbatch_size
    16
    """

    def __init__(self, cache: SizeCache, key: RunKey, *, writes: bool = True) -> None:
        self._cache = cache
        self._key = key
        self._shapes = key.shapes
        self._writes = writes
        self.recalled = cache.find(key)
        """What an earlier run found, None where there was none."""
        self._written = None if self.recalled is None else self._content(self.recalled)

    @property
    def varies(self) -> bool:
        """Whether batches of several shapes were seen, so that the size is not for one shape."""
        return self._key.shapes is not self._shapes

    def see(self, shapes: Mapping[str, str]) -> None:
        """Note the shapes of a batch, from `describe_shapes`; not needed once they vary.

        Args:
            shapes: of the batch.
        """
        if not self.varies and shapes != self._shapes:
            self._key = self._key.with_any_shape()
            # What was written for one shape does not stand under the new key.
            self._written = None

    def settle(self, size: RememberedSize, *, rows: int) -> None:
        """Write a size that a committed batch used, where it is another than before.

        Batches of other rows, such as the last one of an epoch, say nothing of this key.

        Args:
            size: what the batch used.
            rows: of the batch.
        """
        content = self._content(size)
        if rows != self._key.rows or content == self._written or not self._writes:
            return
        self._written = content
        self._cache.remember(self._key, size)

    def _content(self, size: RememberedSize) -> tuple[int, float | None]:
        """What makes two sizes the same: where lengths vary, as many rows may be longer ones."""
        return size.microbatch_size, size.cost_per_row if self.varies else None
