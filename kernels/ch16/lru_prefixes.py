"""Prefix caches with room for a fixed number of tokens; each evicts the least recently used entry.

sessions keeps the kv of each conversation by itself, and finds the one with the longest prefix in
         common with the prompt.
blocks   keeps every full block of 16 (or 64) tokens under a hash of its own and all earlier tokens.
radix    keeps a radix tree whose nodes hold consecutive tokens. A prompt that diverges within a
         node splits it; eviction drops leaves.

``match(prompt)`` returns the kv of the longest cached prefix; ``insert(prompt, kv)`` adds a prompt.
The ``kv`` of a token stands for its keys and values: one number computed from the token and all
tokens before it.
"""

from collections import OrderedDict

import numpy as np

MODULUS = 2**31 - 1
"""Modulus of the recurrence for kv: a prime, so that different prefixes rarely collide."""


def prefill(prompt, cached):
    """Compute the kv of all tokens after the ``cached`` ones, each from the one before it."""
    last, computed = int(cached[-1]) if len(cached) else 1, []
    for token in prompt[len(cached) :]:
        last = (last * 48271 + token + 1) % MODULUS
        computed.append(last)
    return np.array([*cached, *computed])


def serve(tokens, lengths, cache):
    """Serve prompts one after the other; prompt i is the first ``lengths[i]`` tokens of row i.

    Return the sum of each prompt's kv, and the number of tokens whose kv came from the cache.
    """
    sums, reused = [], 0
    for row, length in zip(tokens.tolist(), lengths, strict=True):
        prompt = tuple(row[:length])
        cached = cache.match(prompt)[: len(prompt) - 1]  # the last token is always computed
        kv = prefill(prompt, cached)
        cache.insert(prompt, kv)
        held = sum(map(len, cache.stored()))
        if held != cache.size or held > cache.capacity:
            raise AssertionError(f"the cache holds {held} of at most {cache.capacity} tokens")
        sums.append(kv.sum())
        reused += len(cached)
    return np.array(sums), reused


class Sessions:
    def __init__(self, capacity):
        self.capacity, self.size, self.entries = capacity, 0, OrderedDict()
        self.source, self.shared = (), 0  # the entry with the longest common prefix, and its length

    def match(self, prompt):
        def shared_length(entry):
            pairs = enumerate(zip(entry, prompt, strict=False))
            return next((i for i, (a, b) in pairs if a != b), min(len(entry), len(prompt)))

        self.source = max(self.entries, key=shared_length, default=())
        self.shared = shared_length(self.source)
        if not self.shared:
            return np.empty(0, int)
        self.entries.move_to_end(self.source)
        return self.entries[self.source][: self.shared]

    def stored(self):
        return self.entries.values()

    def insert(self, prompt, kv):
        if prompt in self.entries:
            return
        if self.source and self.shared == len(self.source):  # the prompt extends this entry
            self.size -= len(self.entries.pop(self.source))
        self.entries[prompt] = kv
        self.size += len(kv)
        while self.size > self.capacity:
            self.size -= len(self.entries.popitem(last=False)[1])


class Blocks:
    block = 16
    """Tokens per block."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.blocks = OrderedDict()

    @property
    def size(self):
        return self.block * len(self.blocks)

    def stored(self):
        return self.blocks.values()

    def _hashes(self, prompt):
        prefix_hash = 0
        for at in range(0, len(prompt) - self.block + 1, self.block):
            prefix_hash = hash((prefix_hash, prompt[at : at + self.block]))
            yield at, prefix_hash

    def match(self, prompt):
        hits = []
        for _, prefix_hash in self._hashes(prompt):
            if prefix_hash not in self.blocks:
                break
            hits.append(self.blocks[prefix_hash])
        return np.concatenate([np.empty(0, int), *hits])

    def insert(self, prompt, kv):
        # a block is useless without the earlier ones: insert the last first, to evict it first
        for at, prefix_hash in reversed(list(self._hashes(prompt))):
            self.blocks[prefix_hash] = kv[at : at + self.block]
            self.blocks.move_to_end(prefix_hash)
        while self.size > self.capacity:
            self.blocks.popitem(last=False)


class LargeBlocks(Blocks):
    block = 64


class Node:
    """Consecutive tokens, their kv, the time of their last use, and the nodes that follow."""

    def __init__(self, tokens, kv, parent=None):
        self.tokens, self.kv, self.parent = tokens, kv, parent
        self.last_use, self.children = 0, {}


class Radix:
    def __init__(self, capacity):
        self.capacity, self.size, self.time = capacity, 0, 0
        self.root = Node((), np.empty(0, int))

    def _walk(self, prompt):
        """Yield each node that the prompt reaches, and how many of its tokens match the prompt."""
        node, at = self.root, 0
        while at < len(prompt) and prompt[at] in node.children:
            node = node.children[prompt[at]]
            shared = 0
            for cached, token in zip(node.tokens, prompt[at:], strict=False):
                if cached != token:
                    break
                shared += 1
            yield node, shared
            at += shared
            if shared < len(node.tokens):
                return

    def match(self, prompt):
        runs = [node.kv[:shared] for node, shared in self._walk(prompt)]
        return np.concatenate([np.empty(0, int), *runs])

    def insert(self, prompt, kv):
        self.time += 1
        node, at = self.root, 0
        for child, shared in list(self._walk(prompt)):
            node, at = child, at + shared
            if shared < len(node.tokens):
                self._split(node, shared)
            node.last_use = self.time
        if at < len(prompt):
            leaf = node.children[prompt[at]] = Node(prompt[at:], kv[at:], node)
            leaf.last_use = self.time
            self.size += len(leaf.tokens)
        while self.size > self.capacity:
            self._evict(min(self._leaves(self.root), key=lambda leaf: leaf.last_use))

    def stored(self):
        nodes = [self.root]
        for node in nodes:  # grows as it is walked
            nodes += node.children.values()
        return [node.kv for node in nodes]

    def _split(self, node, at):
        """Move a node's tokens from ``at`` on, its children and its last use to a new child."""
        rest = Node(node.tokens[at:], node.kv[at:], node)
        rest.last_use, rest.children = node.last_use, node.children
        for child in rest.children.values():
            child.parent = rest
        node.tokens, node.kv = node.tokens[:at], node.kv[:at]
        node.children = {rest.tokens[0]: rest}

    def _leaves(self, node):
        if not node.children and node is not self.root:
            yield node
        for child in node.children.values():
            yield from self._leaves(child)

    def _evict(self, leaf):
        del leaf.parent.children[leaf.tokens[0]]
        self.size -= len(leaf.tokens)
