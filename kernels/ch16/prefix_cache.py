"""Prefill of a small attention model over cached keys and values, and two caches to take them from.

A token's keys and values depend only on the tokens before it, so prompts that begin alike share
those of the common beginning. An array of them (``kv``) has the shape tokens x layers x (key,
value) x width: a slice of the first axis belongs to a run of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Tokens = tuple[int, ...]


def prefill(prompt: Tokens, embedding, layers, past):
    """Compute what ``past`` lacks; return the last token's hidden state and the whole prompt's kv.

    ``layers`` holds the query, key, value and output matrices of each layer.
    """
    x = embedding[list(prompt[len(past) :])]
    kv = np.empty((len(prompt), len(layers), 2, x.shape[1]), x.dtype)
    kv[: len(past)] = past
    visible = np.tri(len(x), len(prompt), len(past), dtype=bool)
    for layer, (query, key, value, output) in enumerate(layers):
        kv[len(past) :, layer, 0] = x @ key
        kv[len(past) :, layer, 1] = x @ value
        scores = x @ query @ kv[:, layer, 0].T / x.shape[1] ** 0.5
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        x = x + weights @ kv[:, layer, 1] / weights.sum(1, keepdims=True) @ output
    return x[-1], kv


def serve(prompts, embedding, layers, cache):
    """The last hidden state of each prompt, prompts in order; at least one token is computed."""
    answers = []
    for prompt in map(tuple, prompts.tolist()):
        known = cache.match(prompt)[: len(prompt) - 1]
        answer, kv = prefill(prompt, embedding, layers, known)
        cache.insert(prompt, kv)
        answers.append(answer)
    return np.stack(answers)


NOTHING = np.empty((0, 1, 1, 1), np.float32)


class ExactCache:
    """A dictionary: a prompt served before is known whole, any other not at all."""

    def __init__(self):
        self.served = {}

    def match(self, prompt: Tokens):
        return self.served.get(prompt, NOTHING)

    def insert(self, prompt: Tokens, kv):
        self.served[prompt] = kv


@dataclass(slots=True)
class Node:
    """A run of tokens and its kv; children by the first token of their runs."""

    tokens: Tokens
    kv: np.ndarray
    children: dict[int, Node] = field(default_factory=dict)


class RadixCache:
    """A tree of runs: what several prompts begin with is one path, and is stored once."""

    def __init__(self):
        self.root = Node((), NOTHING)

    def match(self, prompt: Tokens):
        """Return the kv of the longest beginning that any prompt so far shared."""
        parts = [node.kv[:shared] for node, shared in self._path(prompt)]
        return np.concatenate(parts) if parts else NOTHING

    def insert(self, prompt: Tokens, kv):
        node, done = self.root, 0
        for child, shared in self._path(prompt):
            node, done = child, done + shared
            if shared < len(child.tokens):  # the prompt leaves in the middle of a run: cut it there
                rest = Node(child.tokens[shared:], child.kv[shared:], child.children)
                child.tokens, child.kv = child.tokens[:shared], child.kv[:shared]
                child.children = {rest.tokens[0]: rest}
        if done < len(prompt):
            # a copy, for a slice would keep the kv of the whole prompt alive
            node.children[prompt[done]] = Node(prompt[done:], kv[done:].copy())

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
