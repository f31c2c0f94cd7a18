"""Memory as torch's caching allocator gives it out: blocks of segments, for a stream each, kept for later.

Sizes are rounded to 512 bytes. Up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, more
from separate segments, rounded to 2 MiB. The smallest free block of the stream that is large enough is taken and split;
free neighbours are joined. A block on which other streams are recorded can be reused when the host knows that they are
past their work at the time of its release: later than on a GPU, whose events are queried.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

ROUND_BYTES = 512
SMALL_BYTES, SMALL_SEGMENT_BYTES = 1 << 20, 2 << 20
LARGE_BYTES, LARGE_SEGMENT_BYTES = 10 << 20, 20 << 20
SEGMENT_ROUND_BYTES = 2 << 20

IsPast = Callable[[int, int], bool]
"""A function that returns whether the host knows that a stream has done its launch of this number."""
Place = Callable[[int], int]
"""The number of a stream's last launch."""


@dataclass
class _Block:
    address: int
    size: int
    stream: int
    is_small: bool
    before: _Block | None = None
    after: _Block | None = None
    in_use: bool = False
    recorded: dict[int, int] = field(default_factory=dict)  # streams, and what they were given when it was freed


class Allocator:
    """An allocator of addresses. ``active``: bytes in use. ``reserved``: bytes of all segments. Both have peaks."""

    def __init__(self, is_past: IsPast, place: Place) -> None:
        self.active = self.reserved = self.peak_active = self.peak_reserved = 0
        self._is_past = is_past
        self._place = place
        self._end = 0
        self._used: dict[int, _Block] = {}
        self._free: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        self._blocks: dict[int, _Block] = {}
        self._held_up: list[_Block] = []

    def allocate(self, size_bytes: int, stream: int) -> int:
        """Return the address of new memory for a stream."""
        self._release_past()
        size = max(ROUND_BYTES, -(-size_bytes // ROUND_BYTES) * ROUND_BYTES)
        block = self._free_block(size, stream) or self._segment(size, stream)
        self._split(block, size)
        block.in_use = True
        self._used[block.address] = block
        self.active += block.size
        self.peak_active = max(self.peak_active, self.active)
        return block.address

    def record(self, address: int, stream: int) -> None:
        """Note that another stream uses the memory, too."""
        block = self._used[address]
        if stream != block.stream:
            block.recorded[stream] = -1

    def free(self, address: int) -> None:
        """Free memory to which nothing refers any more."""
        block = self._used.pop(address)
        self.active -= block.size
        if block.recorded:
            block.recorded = {stream: self._place(stream) for stream in block.recorded}
            self._held_up.append(block)
        else:
            self._give_back(block)

    def reset_peaks(self) -> None:
        """Count peaks from now on."""
        self.peak_active, self.peak_reserved = self.active, self.reserved

    def _release_past(self) -> None:
        held_up, self._held_up = self._held_up, []
        for block in held_up:
            if all(self._is_past(stream, place) for stream, place in block.recorded.items()):
                block.recorded.clear()
                self._give_back(block)
            else:
                self._held_up.append(block)

    def _free_block(self, size: int, stream: int) -> _Block | None:
        small = size <= SMALL_BYTES
        free = self._free.get((stream, small), [])
        for i, (have, address) in enumerate(free):
            if have >= size:
                del free[i]
                return self._blocks[address]
        return None

    def _segment(self, size: int, stream: int) -> _Block:
        small = size <= SMALL_BYTES
        if small:
            whole = SMALL_SEGMENT_BYTES
        elif size < LARGE_BYTES:
            whole = LARGE_SEGMENT_BYTES
        else:
            whole = -(-size // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES
        block = _Block(self._end, whole, stream, small)
        self._blocks[block.address] = block
        self._end += whole
        self.reserved += whole
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _split(self, block: _Block, size: int) -> None:
        """Leave what is not needed; of large blocks only more than 1 MiB."""
        left = block.size - size
        if left < ROUND_BYTES or (not block.is_small and left <= SMALL_BYTES):
            return
        rest = _Block(block.address + size, left, block.stream, block.is_small, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._blocks[rest.address] = rest
        self._offer(rest)

    def _give_back(self, block: _Block) -> None:
        block.in_use = False
        if block.before is not None and self._is_free(block.before):
            self._take(block.before)
            block = self._merged(block.before, block)
        if block.after is not None and self._is_free(block.after):
            self._take(block.after)
            block = self._merged(block, block.after)
        self._offer(block)

    def _is_free(self, block: _Block) -> bool:
        return not block.in_use and not block.recorded

    def _merged(self, block: _Block, after: _Block) -> _Block:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        del self._blocks[after.address]
        return block

    def _take(self, block: _Block) -> None:
        self._free[block.stream, block.is_small].remove((block.size, block.address))

    def _offer(self, block: _Block) -> None:
        insort(self._free.setdefault((block.stream, block.is_small), []), (block.size, block.address))
