"""A device on the CPU that allocates like CUDA, and makes snapshots like torch.

Storages of real operations live in segments that are split and joined by the rules of torch's
caching allocator. Each has the real Python stack of its creation. As on CUDA, autograd's backward
runs without a Python stack.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from automicro.units import format_bytes

SMALL, SMALL_SEGMENT, LARGE_SEGMENT, MIDDLE = 1 << 20, 2 << 20, 20 << 20, 10 << 20
# Frames that call the mode, which the stacks of a real allocator do not have.
OWN = ("/_python_dispatch.py", "/_dynamo/eval_frame.py", "/torch/_compile.py")
ENGINE = {
    "name": "torch::autograd::Engine::evaluate_function(std::shared_ptr<GraphTask>&, Node*)",
    "filename": "??",
    "line": 0,
}
ALLOCATOR = {"name": "c10::cuda::CUDACachingAllocator::Native::malloc", "filename": "??", "line": 0}


@dataclass
class Block:
    address: int
    size: int
    requested: int = 0
    frames: list[dict[str, Any]] | None = None  # None if it is free


@dataclass
class Segment:
    address: int
    size: int
    blocks: list[Block] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Counts every storage on a device of a given size.

    Args:
        capacity: size of the device in bytes.
        others: bytes used by other processes.
        stacks: "all" as in torch, or "python".
        events: whether to record a history of events, not only the blocks in use.
    """

    def __init__(
        self, capacity: int, *, others: int = 0, stacks: str = "all", events: bool = True
    ) -> None:
        super().__init__()
        self.capacity, self.others, self.stacks = capacity, others, stacks
        self.segments: list[Segment] = []
        self.trace: list[dict[str, Any]] = []
        self.message = ""
        self.snapshot: dict[str, Any] = {}
        self._records = events
        self._next = 0x7F00_0000_0000
        self._held: dict[int, tuple[weakref.ref[Any], Block]] = {}
        self._frames: dict[tuple[Any, int], dict[str, Any]] = {}
        self._freed: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self._see(tree_leaves(output))
        return output

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def allocated(self) -> int:
        return sum(block.size for _, block in self._held.values())

    def _see(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.nbytes() and id(storage) not in self._held:
                    block = self._allocate(storage.nbytes(), self._stack())
                    key = id(storage)
                    self._held[key] = (weakref.ref(storage, self._forget(key)), block)

    def _forget(self, key: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            _, block = self._held.pop(key)
            for action in ("free_requested", "free_completed"):
                self._note(action, block.address, block.requested, [])
            self._free(block)

        return forget

    def _stack(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "_engine_run_backward":
                return [*found, ENGINE] if self.stacks == "all" else found
            if not code.co_filename.endswith(OWN):
                key = (code, frame.f_lineno)
                if key not in self._frames:
                    self._frames[key] = {
                        "name": code.co_name,
                        "filename": code.co_filename,
                        "line": frame.f_lineno,
                    }
                found.append(self._frames[key])
            frame = frame.f_back
        return [ALLOCATOR, *found] if self.stacks == "all" else found

    def _note(self, action: str, address: int, size: int, frames: Any, key: str = "addr") -> None:
        if self._records:
            self.trace.append(
                {
                    "action": action,
                    key: address,
                    "size": size,
                    "stream": 0,
                    "time_us": len(self.trace),
                    "compile_context": "N/A",
                    "user_metadata": "",
                    "frames": frames,
                }
            )

    # Torch's rules

    def _allocate(self, requested: int, frames: list[dict[str, Any]]) -> Block:
        size = -(-requested // 512) * 512
        block = self._find(size) or self._grow(size)
        if block is None:
            self._release_cached()
            block = self._find(size) or self._grow(size)
        if block is None:
            self._note("oom", self._free_bytes(), requested, frames, key="device_free")
            raise self._oom_error(requested)
        self._split(block, size)
        block.requested, block.frames = requested, frames
        self._note("alloc", block.address, requested, frames)
        return block

    def _find(self, size: int) -> Block | None:
        fitting = [
            block
            for segment in self.segments
            if (segment.size == SMALL_SEGMENT) == (size <= SMALL)
            for block in segment.blocks
            if block.frames is None and block.size >= size
        ]
        return min(fitting, key=lambda block: block.size, default=None)

    def _grow(self, size: int) -> Block | None:
        wanted = SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT
        if size >= MIDDLE:
            wanted = -(-size // (2 << 20)) * (2 << 20)
        if wanted > self._free_bytes():
            return None
        segment = Segment(self._next, wanted, [Block(self._next, wanted)])
        self._next += wanted + (2 << 20)
        self.segments.append(segment)
        self._note("segment_alloc", segment.address, wanted, [])
        return segment.blocks[0]

    def _free_bytes(self) -> int:
        return self.capacity - self.others - self.reserved

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        segment = self._segment_of(block)
        if rest >= 512 if segment.size == SMALL_SEGMENT else rest > SMALL:
            index = segment.blocks.index(block)
            segment.blocks.insert(index + 1, Block(block.address + size, rest))
            block.size = size

    def _segment_of(self, block: Block) -> Segment:
        return next(
            each
            for each in self.segments
            if each.address <= block.address < each.address + each.size
        )

    def _free(self, block: Block) -> None:
        block.frames = None
        segment = self._segment_of(block)
        joined: list[Block] = []
        for each in segment.blocks:
            if joined and each.frames is None and joined[-1].frames is None:
                joined[-1].size += each.size
            else:
                joined.append(each)
        segment.blocks = joined

    def _release_cached(self) -> None:
        for segment in list(self.segments):
            if len(segment.blocks) == 1 and segment.blocks[0].frames is None:
                self.segments.remove(segment)
                self._note("segment_free", segment.address, segment.size, [])

    def _oom_error(self, requested: int) -> torch.OutOfMemoryError:
        own = self.reserved
        others = f"Process 4242 has {format_bytes(self.others)} memory in use. "
        self.message = (
            f"CUDA out of memory. Tried to allocate {format_bytes(requested)}. GPU 0 has a total "
            f"capacity of {format_bytes(self.capacity)} of which "
            f"{format_bytes(self._free_bytes())} is free. {others * bool(self.others)}"
            f"Including non-PyTorch memory, this process has {format_bytes(own)} memory in use. Of "
            f"the allocated memory {format_bytes(self.allocated)} is allocated by PyTorch, and "
            f"{format_bytes(own - self.allocated)} is reserved by PyTorch but unallocated."
        )
        self.snapshot = self._take()
        return torch.OutOfMemoryError(self.message)

    def _take(self) -> dict[str, Any]:
        """Return a snapshot like the one that torch's out-of-memory observer takes."""
        return {
            "segments": [self._describe(segment) for segment in self.segments],
            "device_traces": [list(self.trace)],
            "allocator_settings": {"expandable_segments": False},
            "external_annotations": [],
        }

    def _describe(self, segment: Segment) -> Mapping[str, Any]:
        active = sum(block.size for block in segment.blocks if block.frames is not None)
        return {
            "device": 0,
            "address": segment.address,
            "total_size": segment.size,
            "allocated_size": active,
            "active_size": active,
            "requested_size": sum(block.requested for block in segment.blocks if block.frames),
            "stream": 0,
            "segment_type": "small" if segment.size == SMALL_SEGMENT else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested if block.frames is not None else block.size,
                    "state": "inactive" if block.frames is None else "active_allocated",
                    "frames": (block.frames or []) if self._records else [],
                }
                for block in segment.blocks
            ],
        }
