"""Four allocators for the slots of a KV cache, and a simulated server that uses them.

max_length  reserves contiguous slots for the longest possible sequence.
max_answer  reserves contiguous slots for the prompt and the longest possible answer.
buddy       keeps each sequence in a block whose size is a power of two, and moves it to a block of
            twice the size when it outgrows its own: at most half of a block is unused.
paged       hands out pages of 16 slots as a sequence grows: less than one page per sequence is
            unused.

Interface of an allocator: ``grow`` reserves slots for a sequence of the given length and returns
False when the pool has no room; ``slots`` returns the slots of a range of tokens in order;
``release`` frees all slots of a sequence.
"""

import numpy as np

PAGE = 16
"""Slots per page."""


class MaxLength:
    def __init__(self, memory, max_length):
        last = len(memory) - max_length
        self.free = [np.arange(at, at + max_length) for at in range(0, last + 1, max_length)]
        self.reserved = {}

    def grow(self, sequence, _length):
        if sequence not in self.reserved:
            if not self.free:
                return False
            self.reserved[sequence] = self.free.pop()
        return True

    def slots(self, sequence, first, end):
        return self.reserved[sequence][first:end]

    def release(self, sequence):
        self.free.append(self.reserved.pop(sequence))


class MaxAnswer:
    """Free and reserved slots are (start, end) pairs; the first gap that is long enough is used."""

    def __init__(self, memory, max_answer):
        self.max_answer, self.gaps, self.reserved = max_answer, [(0, len(memory))], {}

    def grow(self, sequence, length):
        if sequence in self.reserved:
            return True
        size = length + self.max_answer  # the first length is that of the prompt
        for i, (start, end) in enumerate(self.gaps):
            if end - start >= size:
                self.reserved[sequence] = start, start + size
                self.gaps[i] = start + size, end
                return True
        return False

    def slots(self, sequence, first, end):
        start, _ = self.reserved[sequence]
        return np.arange(start + first, start + end)

    def release(self, sequence):
        gaps, self.gaps = sorted([*self.gaps, self.reserved.pop(sequence)]), []
        for start, end in gaps:
            adjacent = self.gaps and self.gaps[-1][1] == start
            self.gaps.append((self.gaps.pop()[0] if adjacent else start, end))


class Buddy:
    """Blocks are (start, size) pairs; the size of the pool is a power of two."""

    def __init__(self, memory, _max_length):
        self.memory, pool = memory, len(memory)
        self.free = {pool >> i: set() for i in range(pool.bit_length())}
        self.free[pool].add(0)
        self.blocks = {}

    def _allocate(self, size):
        block_size = next((s for s in sorted(self.free) if s >= size and self.free[s]), None)
        if block_size is None:
            return None
        start = self.free[block_size].pop()
        while block_size > size:  # split: the upper half stays free
            block_size //= 2
            self.free[block_size].add(start + block_size)
        return start, size

    def _free_block(self, start, size):
        while size in self.free and start ^ size in self.free[size]:  # merge with a free buddy
            self.free[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self.free[size].add(start)

    def grow(self, sequence, length):
        old = self.blocks.get(sequence)
        if old is None or length > old[1]:
            new = self._allocate(1 << (length - 1).bit_length())
            if new is None:
                return False
            self.blocks[sequence] = new
            if old:
                start, size = old
                self.memory[new[0] : new[0] + size] = self.memory[start : start + size]
                self._free_block(start, size)
        return True

    def slots(self, sequence, first, end):
        start, _ = self.blocks[sequence]
        return np.arange(start + first, start + end)

    def release(self, sequence):
        self._free_block(*self.blocks.pop(sequence))


class Paged:
    def __init__(self, memory, _max_length):
        self.free = list(range(0, len(memory), PAGE))
        self.page_tables = {}

    def grow(self, sequence, length):
        pages = self.page_tables.get(sequence, [])
        missing = -(-length // PAGE) - len(pages)
        if missing > len(self.free):
            return False
        self.page_tables[sequence] = pages + [self.free.pop() for _ in range(missing)]
        return True

    def slots(self, sequence, first, end):
        tokens = np.arange(first, end)
        return np.array(self.page_tables[sequence])[tokens // PAGE] + tokens % PAGE

    def release(self, sequence):
        self.free += self.page_tables.pop(sequence)


def serve(prompts, lengths, values, pool, allocator_class):
    """Serve sequences in order of arrival: each step adds one token to every admitted sequence.

    ``prompts`` and ``lengths`` are token counts. ``values`` (sequences x longest) stands for keys
    and values: a token's value is written to its slot when the token is generated, and all are read
    when the sequence ends. When a sequence needs a slot and none is free, the youngest sequence is
    preempted: it frees its slots, returns to the head of the queue, and later starts again.

    Return, per sequence, the sum of its values, the step of its last admission, and the step at
    which it ended.
    """
    memory, sums = np.zeros(pool, values.dtype), np.zeros(len(values), values.dtype)
    admitted, ended = np.zeros((2, len(values)), int)
    allocator = allocator_class(memory, values.shape[1])
    queue, running, steps = list(range(len(lengths)))[::-1], {}, 0
    while queue or running:
        while queue and allocator.grow(queue[-1], int(prompts[queue[-1]])):
            sequence = queue.pop()
            running[sequence] = prompt = int(prompts[sequence])
            admitted[sequence] = steps
            memory[allocator.slots(sequence, 0, prompt)] = values[sequence, :prompt]
        if not running:
            raise ValueError("a prompt is larger than the pool")
        for sequence, length in list(running.items()):
            while sequence in running and not allocator.grow(sequence, length + 1):
                youngest, _ = running.popitem()
                allocator.release(youngest)
                queue.append(youngest)
            if sequence not in running:
                continue  # it has just been preempted
            memory[allocator.slots(sequence, length, length + 1)] = values[sequence, length]
            running[sequence] = length + 1
            if running[sequence] == lengths[sequence]:
                sums[sequence] = memory[allocator.slots(sequence, 0, lengths[sequence])].sum()
                allocator.release(sequence)
                del running[sequence]
                ended[sequence] = steps + 1
        steps += 1
    return sums, admitted, ended
