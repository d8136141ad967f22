"""Prefill of a small attention model over cached keys and values, and two prefix caches.

A token's keys and values depend only on the tokens before it, so prompts with a common prefix share
those of the prefix. An array of them (``kv``) has the shape tokens x layers x (key, value) x width;
a slice of its first axis belongs to consecutive tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Tokens = tuple[int, ...]


def prefill(prompt: Tokens, embedding, layers, past=()):
    """Run the model on the tokens of the prompt that follow the cached ones.

    Return the last hidden state and the kv of these tokens.

    ``past`` is a list of arrays, which together are the kv of the cached tokens. Attention reads
    them in place: joining them would copy the whole cached kv for each request. ``layers`` holds
    the query, key, value and output matrices of each layer.
    """
    cached = sum(map(len, past))
    x = embedding[list(prompt[cached:])]
    kv = np.empty((len(x), len(layers), 2, x.shape[1]), x.dtype)
    runs = [*past, kv]
    ends = np.cumsum([len(run) for run in runs])
    mask = np.triu(np.full((len(x), len(prompt)), -np.inf, x.dtype), cached + 1)
    for layer, (query, key, value, output) in enumerate(layers):
        kv[:, layer, 0] = x @ key
        kv[:, layer, 1] = x @ value
        scaled_query = x @ query / x.shape[1] ** 0.5
        scores = np.hstack([scaled_query @ run[:, layer, 0].T for run in runs]) + mask
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        parts = zip(np.hsplit(weights, ends[:-1]), runs, strict=True)
        x = x + sum(part @ run[:, layer, 1] for part, run in parts) @ output
    return x[-1], kv


def serve(prompts, embedding, layers, cache):
    """Return the last hidden state of each prompt; its last token is never taken from the cache."""
    hidden_states = []
    for prompt in map(tuple, prompts.tolist()):
        hidden, kv = prefill(prompt, embedding, layers, cache.match(prompt[:-1]))
        cache.insert(prompt[:-1], kv[:-1])
        hidden_states.append(hidden)
    return np.stack(hidden_states)


class ExactCache:
    """A dictionary of whole prompts: it finds only exact repeats."""

    def __init__(self):
        self.entries = {}

    def match(self, prompt: Tokens):
        return [self.entries[prompt]] if prompt in self.entries else []

    def insert(self, prompt: Tokens, kv):
        self.entries.setdefault(prompt, kv)


@dataclass(slots=True)
class Node:
    """Consecutive tokens and their kv. The key of a child is its first token."""

    tokens: Tokens
    kv: np.ndarray
    children: dict[int, Node] = field(default_factory=dict)


class RadixCache:
    """A radix tree, which stores a prefix once even if several prompts begin with it."""

    def __init__(self):
        self.root = Node((), np.empty(0))

    def match(self, prompt: Tokens):
        """Return the kv of the longest cached prefix of the prompt: one array per tree node."""
        return [node.kv[:shared] for node, shared in self._path(prompt)]

    def insert(self, prompt: Tokens, kv):
        """Add the tokens of the prompt that ``match`` did not find; ``kv`` is theirs."""
        node = self.root
        for child, shared in self._path(prompt):
            node = child
            if shared < len(child.tokens):  # the prompt diverges within a node: split it
                rest = Node(child.tokens[shared:], child.kv[shared:], child.children)
                child.tokens, child.kv = child.tokens[:shared], child.kv[:shared]
                child.children = {rest.tokens[0]: rest}
        if len(kv):
            new = prompt[len(prompt) - len(kv) :]
            node.children[new[0]] = Node(new, kv)

    def _path(self, prompt: Tokens) -> list[tuple[Node, int]]:
        """Return each node that the prompt reaches, and how many of its tokens match the prompt."""
        path, node, at = [], self.root, 0
        while at < len(prompt) and prompt[at] in node.children:
            node = node.children[prompt[at]]
            shared = _shared_length(node.tokens, prompt[at:])
            path.append((node, shared))
            if shared < len(node.tokens):
                break
            at += shared
        return path


def _shared_length(a: Tokens, b: Tokens) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
