"""A prefix cache, in blocks or as a radix tree, reuses more tokens than a cache of whole prompts.

The keys and values of a token depend only on the tokens before it, so prompts with a common prefix
can share them. The requests here are turns of chats: one of four system prompts, followed by the
chat so far. A dictionary of whole prompts, the usual response cache, finds only exact repeats.
Hashing each block of 16 tokens together with all tokens before it ("blocks") finds the longest
cached prefix in whole blocks; a radix tree ("radix") finds all of it. Per request the two differ by
less than one block where both still hold the prefix.

Both arms of a comparison have room for the same number of tokens and evict the least recently used;
the tree evicts leaves, so a prefix outlives its continuations. The score counts reused tokens
exactly, and the reused values must be right: each prompt's values are compared with those computed
from its first token. The gain depends on the trace: there is none where prompts share no prefix, or
where all repeats are exact. ch16/prefix_cache measures the time that reused tokens save.
"""

import numpy as np
import pytest

from kernels.ch16 import lru_prefixes
from pytest_aiperf import Bench, Compare, Score

RUNGS = {"blocks": lru_prefixes.Blocks, "radix": lru_prefixes.Radix}


def chats(bench: Bench) -> tuple[np.ndarray, np.ndarray, int]:
    """Make the turns of chats as zero-padded prompts with lengths; some turns are sent twice."""
    rng = np.random.default_rng(bench.seed)
    turns, open_count = bench.size(600, check=40), bench.size(24, check=4)

    def message(min_length, max_length):
        length = rng.integers(min_length, max_length)
        return tuple(rng.integers(0, 1000, length).tolist())

    systems = [message(100, 300) for _ in range(4)]
    open_chats, prompts = [], []
    while len(prompts) < turns:
        if len(open_chats) < open_count:
            open_chats.append(systems[rng.choice(4, p=[0.4, 0.3, 0.2, 0.1])])
        chat = rng.integers(len(open_chats))
        open_chats[chat] += message(10, 60)
        prompts += [open_chats[chat]] * (1 + (rng.random() < 0.25))
        open_chats[chat] += message(20, 80)  # the answer
        if len(open_chats[chat]) > 700:
            del open_chats[chat]
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), 1000), int)
    tokens[np.arange(1000) < lengths[:, None]] = np.concatenate(prompts)
    return tokens, lengths, bench.size(6000, check=1000)


def simulate(cache_class):
    def arm(tokens, lengths, capacity):
        sums, reused = lru_prefixes.serve(tokens, lengths, cache_class(capacity))
        return sums, Score(reused, "tokens reused")

    return arm


def uncached(tokens, lengths, capacity):
    prompts = (row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True))
    return np.array([lru_prefixes.prefill(prompt, ()).sum() for prompt in prompts])


@pytest.mark.host
def test_the_rest_of_a_split_run_is_dropped_in_its_turn() -> None:
    tree = lru_prefixes.Radix(capacity=5)
    for prompt in ((1, 2, 3), (4,), (5,), (1, 6)):  # (1, 6) splits (1, 2, 3) and evicts its rest
        tree.insert(prompt, lru_prefixes.prefill(prompt, ()))
    assert [len(tree.match(prompt)) for prompt in ((1, 2, 3), (4,), (5,), (1, 6))] == [1, 1, 1, 2]


@pytest.mark.host
@pytest.mark.parametrize("rung", RUNGS)
def test_radix_tree_host(compare: Compare, rung: str) -> None:
    compare(
        baseline=simulate(lru_prefixes.Exact),
        optimized=simulate(RUNGS[rung]),
        inputs=chats,
        reference=uncached,
        metric="score",
    )
