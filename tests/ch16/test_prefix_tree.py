"""Unit test of the radix tree in kernels/ch16/prefix_cache.py."""

import numpy as np

from kernels.ch16.prefix_cache import RadixTree


def common(first, second):
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def test_the_longest_prefix_is_found_in_the_slots_of_its_tokens() -> None:
    rng, tree, earlier, texts = np.random.default_rng(1), RadixTree(), [], []
    for _ in range(200):
        prompt = rng.integers(0, 2, rng.integers(1, 10))
        ranges, count = tree.insert(prompt, len(texts))
        slots = [slot for run in ranges for slot in run]
        longest = max((common(other, prompt) for other in earlier), default=0)
        assert count == min(longest, len(prompt) - 1)  # the last token is always computed
        assert slots[count:] == [*range(len(texts), len(texts) + len(prompt) - count)]
        texts += [tuple(prompt[: end + 1]) for end in range(count, len(prompt))]
        assert [texts[slot] for slot in slots] == [
            tuple(prompt[: i + 1]) for i in range(len(slots))
        ]
        earlier.append(prompt)
