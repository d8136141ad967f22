"""Unit test of the radix tree in kernels/ch16/lru_prefixes.py."""

import numpy as np

from kernels.ch16 import lru_prefixes


def test_the_rest_of_a_split_run_is_dropped_in_its_turn() -> None:
    tree = lru_prefixes.Radix(capacity=5)
    for prompt in ((1, 2, 3), (4,), (5,), (1, 6)):  # (1, 6) splits (1, 2, 3) and evicts its rest
        tree.insert(prompt, lru_prefixes.prefill(prompt, ()))
    assert [len(tree.match(prompt)) for prompt in ((1, 2, 3), (4,), (5,), (1, 6))] == [1, 1, 1, 2]


def test_the_tokens_that_are_reused_are_counted() -> None:
    tokens = np.array([[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 6]])
    caches = lru_prefixes.Radix(100), lru_prefixes.Sessions(100), lru_prefixes.Blocks(100)
    reused = [lru_prefixes.serve(tokens, np.full(3, 4), cache)[1] for cache in caches]
    assert reused == [2 + 3, 2 + 3, 0]  # the last token is always computed; blocks have 16
