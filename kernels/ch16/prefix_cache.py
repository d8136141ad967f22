"""Prefill of a small attention model over cached keys and values, and two caches to take them from.

A token's keys and values depend only on the tokens before it, so prompts that begin alike share
those of the common beginning. An array of them (``kv``) has the shape tokens x layers x (key,
value) x width: a slice of its first axis belongs to a run of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Tokens = tuple[int, ...]


def prefill(prompt: Tokens, embedding, layers, past=()):
    """Compute the tokens beyond ``past`` (the kv of runs): their last hidden state and their kv.

    ``layers`` holds the query, key, value and output matrices of each layer. Attention reads the
    cached runs where they are: joining them would copy the whole prompt's kv for each request.
    """
    known = sum(map(len, past))
    x = embedding[list(prompt[known:])]
    kv = np.empty((len(x), len(layers), 2, x.shape[1]), x.dtype)
    runs = [*past, kv]
    ends = np.cumsum([len(run) for run in runs])
    later = np.triu(np.full((len(x), len(prompt)), -np.inf, x.dtype), known + 1)
    for layer, (query, key, value, output) in enumerate(layers):
        kv[:, layer, 0] = x @ key
        kv[:, layer, 1] = x @ value
        asked = x @ query / x.shape[1] ** 0.5
        scores = np.hstack([asked @ run[:, layer, 0].T for run in runs]) + later
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        parts = zip(np.hsplit(weights, ends[:-1]), runs, strict=True)
        x = x + sum(part @ run[:, layer, 1] for part, run in parts) @ output
    return x[-1], kv


def serve(prompts, embedding, layers, cache):
    """Return the last hidden state of each prompt; its last token is never cached, for that."""
    answers = []
    for prompt in map(tuple, prompts.tolist()):
        answer, kv = prefill(prompt, embedding, layers, cache.match(prompt[:-1]))
        cache.insert(prompt[:-1], kv[:-1])
        answers.append(answer)
    return np.stack(answers)


class ExactCache:
    """A dictionary: a prompt served before is known whole, any other not at all."""

    def __init__(self):
        self.served = {}

    def match(self, prompt: Tokens):
        return [self.served[prompt]] if prompt in self.served else []

    def insert(self, prompt: Tokens, kv):
        self.served.setdefault(prompt, kv)


@dataclass(slots=True)
class Node:
    """A run of tokens and its kv; children by the first token of their runs."""

    tokens: Tokens
    kv: np.ndarray
    children: dict[int, Node] = field(default_factory=dict)


class RadixCache:
    """A tree of runs: what several prompts begin with is one path, and is stored once."""

    def __init__(self):
        self.root = Node((), np.empty(0))

    def match(self, prompt: Tokens):
        """Return the kv of each run of the longest beginning that an earlier prompt shares."""
        return [node.kv[:shared] for node, shared in self._path(prompt)]

    def insert(self, prompt: Tokens, kv):
        """Add what ``match`` did not know: ``kv`` belongs to the end of the prompt."""
        node = self.root
        for child, shared in self._path(prompt):
            node = child
            if shared < len(child.tokens):  # the prompt leaves in the middle of a run: cut it there
                rest = Node(child.tokens[shared:], child.kv[shared:], child.children)
                child.tokens, child.kv = child.tokens[:shared], child.kv[:shared]
                child.children = {rest.tokens[0]: rest}
        if len(kv):
            new = prompt[len(prompt) - len(kv) :]
            node.children[new[0]] = Node(new, kv)

    def _path(self, prompt: Tokens) -> list[tuple[Node, int]]:
        """The nodes along the prompt, each with how many of its tokens the prompt shares."""
        path, node, done = [], self.root, 0
        while done < len(prompt) and prompt[done] in node.children:
            node = node.children[prompt[done]]
            shared = _common(node.tokens, prompt[done:])
            path.append((node, shared))
            if shared < len(node.tokens):
                break
            done += shared
        return path


def _common(a: Tokens, b: Tokens) -> int:
    """Length of the common beginning of two runs."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
