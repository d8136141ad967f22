"""Caches of prompt prefixes that hold so many tokens and drop what was used least recently.

exact    a whole prompt is found only if it was served before.
blocks   every full block of 16 tokens is kept under a name for itself and all before it.
radix    a tree of runs of tokens; a prompt that leaves a run splits it, and leaves are dropped.

`match(prompt)` gives what is known of a prompt's beginning, `insert(prompt, kv)` takes the rest in.
What is kept of a token, its `kv`, stands for keys and values: a number made of it and all before.
"""

from collections import OrderedDict

import numpy as np

BLOCK = 16
MODULUS = 2**31 - 1


def prefill(prompt, known):
    """Compute the kv of all tokens beyond those known: each follows from the one before."""
    last, made = int(known[-1]) if len(known) else 1, []
    for token in prompt[len(known) :]:
        last = (last * 48271 + token + 1) % MODULUS
        made.append(last)
    return np.array([*known, *made])


def serve(tokens, lengths, cache):
    """Serve prompts, the beginnings of the rows of ``tokens``, one after the other.

    Return the sum of each prompt's kv, and how many of them were found in the cache.
    """
    sums, reused = [], 0
    for row, length in zip(tokens.tolist(), lengths, strict=True):
        prompt = tuple(row[:length])
        known = cache.match(prompt)[: len(prompt) - 1]  # the last token is always computed
        kv = prefill(prompt, known)
        cache.insert(prompt, kv)
        if cache.size > cache.room:
            raise AssertionError(f"{cache.size} tokens are kept in room for {cache.room}")
        sums.append(kv.sum())
        reused += len(known)
    return np.array(sums), reused


class Exact:
    def __init__(self, room):
        self.room, self.size = room, 0
        self.kept = OrderedDict()

    def match(self, prompt):
        if prompt in self.kept:
            self.kept.move_to_end(prompt)
        return self.kept.get(prompt, np.empty(0, int))

    def insert(self, prompt, kv):
        self.size += 0 if prompt in self.kept else len(kv)
        self.kept[prompt] = kv
        while self.size > self.room:
            self.size -= len(self.kept.popitem(last=False)[1])


class Blocks:
    def __init__(self, room):
        self.room = room
        self.kept = OrderedDict()

    @property
    def size(self):
        return BLOCK * len(self.kept)

    def _names(self, prompt):
        name = 0
        for at in range(0, len(prompt) - BLOCK + 1, BLOCK):
            name = hash((name, prompt[at : at + BLOCK]))
            yield at, name

    def match(self, prompt):
        found = []
        for _, name in self._names(prompt):
            if name not in self.kept:
                break
            found.append(self.kept[name])
        return np.concatenate([np.empty(0, int), *found])

    def insert(self, prompt, kv):
        # from the end: a block is worth nothing without those before it, which are dropped later
        for at, name in reversed(list(self._names(prompt))):
            self.kept[name] = kv[at : at + BLOCK]
            self.kept.move_to_end(name)
        while self.size > self.room:
            self.kept.popitem(last=False)


class Node:
    """A run of tokens with its kv, when it was last used, and the runs that follow it."""

    def __init__(self, tokens, kv, parent=None):
        self.tokens, self.kv, self.parent = tokens, kv, parent
        self.used, self.after = 0, {}


class Radix:
    def __init__(self, room):
        self.room, self.size, self.now = room, 0, 0
        self.root = Node((), np.empty(0, int))

    def _walk(self, prompt):
        """Follow a prompt from the root: each node on its way, and how much of it is shared."""
        node, at = self.root, 0
        while at < len(prompt) and prompt[at] in node.after:
            node = node.after[prompt[at]]
            shared = 0
            for mine, theirs in zip(node.tokens, prompt[at:], strict=False):
                if mine != theirs:
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
        self.now += 1
        node, at = self.root, 0
        for child, shared in list(self._walk(prompt)):
            node, at = child, at + shared
            if shared < len(node.tokens):
                self._split(node, shared)
            node.used = self.now
        if at < len(prompt):
            leaf = node.after[prompt[at]] = Node(prompt[at:], kv[at:], node)
            leaf.used = self.now
            self.size += len(leaf.tokens)
        while self.size > self.room:
            self._drop(min(self._leaves(self.root), key=lambda leaf: leaf.used))

    def _split(self, node, at):
        """Cut a run: the rest keeps what followed, and is no more recent than it was."""
        rest = Node(node.tokens[at:], node.kv[at:], node)
        rest.used, rest.after = node.used, node.after
        for child in rest.after.values():
            child.parent = rest
        node.tokens, node.kv, node.after = node.tokens[:at], node.kv[:at], {rest.tokens[0]: rest}

    def _leaves(self, node):
        if not node.after and node is not self.root:
            yield node
        for child in node.after.values():
            yield from self._leaves(child)

    def _drop(self, leaf):
        del leaf.parent.after[leaf.tokens[0]]
        self.size -= len(leaf.tokens)
