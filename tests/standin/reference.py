"""Torch's caching allocator for CUDA, in Python, to compare with the compiled one."""

import itertools
from dataclasses import dataclass, field

MIB = 2**20


class FullError(Exception):
    """The device has no memory, even after all free segments were returned."""


@dataclass(eq=False)
class Block:
    size: int
    is_small: bool
    address: int
    before: "Block | None" = None
    after: "Block | None" = None
    is_used: bool = False

    @property
    def is_split(self) -> bool:
        return self.before is not None or self.after is not None


@dataclass
class Reference:
    """The allocator of one stream. Addresses grow, so the oldest of equal blocks is taken."""

    capacity: int
    free: list[Block] = field(default_factory=list)
    allocated: int = 0
    reserved: int = 0
    segments: int = 0
    retries: int = 0
    ooms: int = 0

    def __post_init__(self) -> None:
        self._addresses = itertools.count(step=2**40)

    @property
    def stranded(self) -> int:
        """Return free bytes that cannot be returned, because their segment is in use."""
        return sum(block.size for block in self.free if block.is_split)

    def malloc(self, requested: int) -> Block:
        size = max(-(-requested // 512) * 512, 512)
        is_small = size <= MIB
        fitting = [each for each in self.free if each.is_small == is_small and each.size >= size]
        block = min(fitting, key=lambda each: (each.size, each.address), default=None)
        if block is not None:
            self.free.remove(block)
        else:
            block = self._segment(size, is_small)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._segment(size, is_small)
        if block is None:
            self.ooms += 1
            raise FullError
        rest = block.size - size
        if rest >= 512 if is_small else rest > MIB:
            other = Block(rest, is_small, block.address + size, before=block, after=block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            self.free.append(other)
        block.is_used = True
        self.allocated += block.size
        return block

    def release(self, block: Block) -> None:
        block.is_used = False
        self.allocated -= block.size
        if block.after is not None and not block.after.is_used:
            self.free.remove(block.after)
            _join(block, block.after)
        before = block.before
        if before is not None and not before.is_used:
            self.free.remove(before)
            _join(before, block)
            block = before
        self.free.append(block)

    def empty_cache(self) -> None:
        for block in [each for each in self.free if not each.is_split]:
            self.free.remove(block)
            self.reserved -= block.size
            self.segments -= 1

    def _segment(self, size: int, is_small: bool) -> Block | None:
        own = -(-size // (2 * MIB)) * 2 * MIB
        total = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else own
        if self.reserved + total > self.capacity:
            return None
        self.reserved += total
        self.segments += 1
        return Block(total, is_small, next(self._addresses))


def _join(block: Block, after: Block) -> None:
    block.size += after.size
    block.after = after.after
    if block.after is not None:
        block.after.before = block
