"""Who gets which slots of a key-value pool: three allocators, and a server that puts them to use.

max_length  reserves as many slots as a text could ever need, side by side.
buddy       keeps each text in a block of a power of two, and moves it to one of twice the size
            when it has outgrown its own: at most half of a block is unused.
paged       hands out pages of 16 slots as a text grows: less than one page of each is unused.

An allocator gets a text slots for so many tokens by `grow` (False when the pool has no room), says
by `slots` which they are, in the order of the tokens, and gives all back by `release`.
"""

import numpy as np

PAGE = 16


class MaxLength:
    def __init__(self, memory, longest):
        pool = len(memory)
        self.free = [np.arange(at, at + longest) for at in range(0, pool - longest + 1, longest)]
        self.held = {}

    def grow(self, text, _length):
        if text not in self.held:
            if not self.free:
                return False
            self.held[text] = self.free.pop()
        return True

    def slots(self, text, first, end):
        return self.held[text][first:end]

    def release(self, text):
        self.free.append(self.held.pop(text))


class Buddy:
    """Blocks are (start, size); the pool is a power of two."""

    def __init__(self, memory, _longest):
        self.memory, pool = memory, len(memory)
        self.free = {pool >> i: set() for i in range(pool.bit_length())}
        self.free[pool].add(0)
        self.held = {}

    def _take(self, size):
        fits = next((s for s in sorted(self.free) if s >= size and self.free[s]), None)
        if fits is None:
            return None
        start = self.free[fits].pop()
        while fits > size:  # the upper halves stay free
            fits //= 2
            self.free[fits].add(start + fits)
        return start, size

    def _give(self, start, size):
        while size in self.free and start ^ size in self.free[size]:  # the other half is free, too
            self.free[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self.free[size].add(start)

    def grow(self, text, length):
        old = self.held.get(text)
        if old is None or length > old[1]:
            new = self._take(1 << (length - 1).bit_length())
            if new is None:
                return False
            self.held[text] = new
            if old:
                start, size = old
                self.memory[new[0] : new[0] + size] = self.memory[start : start + size]
                self._give(start, size)
        return True

    def slots(self, text, first, end):
        start, _ = self.held[text]
        return np.arange(start + first, start + end)

    def release(self, text):
        self._give(*self.held.pop(text))


class Paged:
    def __init__(self, memory, _longest):
        self.free = list(range(0, len(memory), PAGE))
        self.held = {}

    def grow(self, text, length):
        pages = self.held.get(text, [])
        missing = -(-length // PAGE) - len(pages)
        if missing > len(self.free):
            return False
        self.held[text] = pages + [self.free.pop() for _ in range(missing)]
        return True

    def slots(self, text, first, end):
        tokens = np.arange(first, end)
        return np.array(self.held[text])[tokens // PAGE] + tokens % PAGE

    def release(self, text):
        self.free += self.held.pop(text)


def serve(prompts, lengths, values, pool, kind):
    """Serve texts in order of arrival, each step one token of every admitted one.

    ``values`` (texts x longest) stands for keys and values: a text's are written to its slots as
    its tokens are made, and read at its end. Return their sums, and how many texts got a token in a
    step on average. When a text needs a slot and there is none, the youngest gives way: it frees
    its slots, goes back to the head of the queue, and starts anew.
    """
    memory, sums = np.zeros(pool, values.dtype), np.zeros(len(values), values.dtype)
    allocator = kind(memory, values.shape[1])
    queue, running, steps = list(range(len(lengths)))[::-1], {}, 0
    while queue or running:
        while queue and allocator.grow(queue[-1], int(prompts[queue[-1]])):
            text = queue.pop()
            running[text] = int(prompts[text])
            memory[allocator.slots(text, 0, running[text])] = values[text, : running[text]]
        if not running:
            raise ValueError("a prompt is larger than the pool")
        for text, length in list(running.items()):
            while text in running and not allocator.grow(text, length + 1):
                youngest, _ = running.popitem()
                allocator.release(youngest)
                queue.append(youngest)
            if text not in running:
                continue  # it gave way
            memory[allocator.slots(text, length, length + 1)] = values[text, length]
            running[text] = length + 1
            if running[text] == lengths[text]:
                sums[text] = memory[allocator.slots(text, 0, lengths[text])].sum()
                allocator.release(text)
                del running[text]
        steps += 1
    return sums, float((lengths - prompts).sum()) / steps
